"""Argument checks of public functions and classes, made from their type annotations."""

from intaglio.argument_checks.check_arguments import (
    check_arguments,
    check_arguments_except,
    check_fields,
    check_fields_except,
)
from intaglio.argument_checks.nesting import WITHOUT_CYCLES, nesting_problem
from intaglio.argument_checks.value_text import value_text

__all__ = [
    "WITHOUT_CYCLES",
    "check_arguments",
    "check_arguments_except",
    "check_fields",
    "check_fields_except",
    "nesting_problem",
    "value_text",
]
