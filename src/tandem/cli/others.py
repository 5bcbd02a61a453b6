"""Commands and options of other libraries, such as `trl grpo --model_name_or_path`: say how they are written here."""

from __future__ import annotations

from typing import Any

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


class SpecCommand(TyperCommand):
    """A command that takes a spec, and knows others' options as settings of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        known = {option for each in self.params for option in (*each.opts, *each.secondary_opts)}
        for word in () if ctx.resilient_parsing else args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known and (ours := others_names.of_field(option[2:])):
                ctx.fail(f"No such option {option}: settings stand in the spec, or behind --set; write {ours}")
        return super().parse_args(ctx, args)
