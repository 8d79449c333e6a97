"""Other places a reference model can go than the native program."""
