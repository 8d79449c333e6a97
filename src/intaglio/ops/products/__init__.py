"""Operators that multiply and accumulate: convolutions, linear layers, attention, recurrent layers."""
