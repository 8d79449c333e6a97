"""What a user asks for: recipes, settings, data types, image inputs, patterns."""
