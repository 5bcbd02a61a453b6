"""Refuse what is wrong on a command line in Tandem's words: a value, and commands and options of other libraries, such
as `trl grpo --model_name_or_path`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tandem.spec import others_names


class CommandsWithOthers(TyperGroup):
    """A group of commands that knows those of TRL."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = "" if ctx.resilient_parsing else args[0]  # resilient: a shell asks for completions
        if self.get_command(ctx, name) is None and others_names.of_recipe(name):
            from tandem.spec.load import meant_recipe

            ctx.fail(
                f"No such command '{name}': what is trained stands in the spec of `tandem train`; {meant_recipe(name)}"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if error.__cause__ is not None:
                error.message = _refused(error.__cause__) or error.message
            raise


def _refused(error: BaseException) -> str:
    """Return why an option's value is refused, from pydantic's error, which typer shows as it is; empty for others."""
    from pydantic import ValidationError

    from tandem.spec.load import plain_message

    if not isinstance(error, ValidationError):
        return ""
    item = error.errors(include_url=False)[0]
    message = plain_message(item)
    _, is_choice, choices = message.partition(" is not one of ")
    if is_choice:
        message = "must be one of " + choices.rstrip(".").removeprefix("'', ")
    return f"{item['input']!r} {message}"


class SpecCommand(TyperCommand):
    """A command that takes a spec, and knows others' options as settings of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        known = {option for each in self.params for option in (*each.opts, *each.secondary_opts)}
        for word in () if ctx.resilient_parsing else args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known and (ours := others_names.of_field(option[2:])):
                ctx.fail(f"No such option {option}: settings stand in the spec, or behind --set; write {ours}")
        return super().parse_args(ctx, args)
