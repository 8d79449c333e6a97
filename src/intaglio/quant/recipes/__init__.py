"""User-facing configuration: recipes, settings, datatypes, image inputs and patterns."""
