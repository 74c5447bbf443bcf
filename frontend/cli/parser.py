"""The parser of a command: short help, help by topic, hints at what was meant."""

import argparse
import difflib
import re
import sys
from typing import NoReturn

from headrace.frontend.cli.known_flags import KNOWN_FLAGS

EXIT_USAGE = 2
_MANY_OPTIONS = 30  # of a parser: from here on its help is short and by topic
_MANY_IN_GROUP = 15
MOST_USED = (
    "--max-model-len", "--dtype", "--kv-cache-memory-bytes", "--max-num-seqs",
    "--max-num-batched-tokens", "--seed", "--tokenizer", "--served-model-name",
    "--generation-config", "--enable-prefix-caching", "--disable-log-stats", "--host", "--port",
    "--api-key", "--chat-template", "--enable-log-requests",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse whose help stays short, and whose errors name the nearest option."""

    def chosen(self, words: list[str]) -> "Parser":
        """The parser of the (sub-)command that the first words name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names = [word for word in words if not word.startswith("-")]
                inner = action.choices.get(names[0]) if names else None
                if isinstance(inner, Parser):
                    return inner.chosen(names[1:])
        return self

    def option(self, flag: str) -> argparse.Action | None:
        """The action of an option's spelling."""
        return self._option_string_actions.get(flag)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {self._with_hint(message)}\n")

    def format_usage(self) -> str:
        if not self._is_long():
            return super().format_usage()
        names = [f"[{action.metavar or action.dest}]" for action in self._get_positional_actions()]
        return f"usage: {' '.join([self.prog, *names, '[options]'])}\n"

    def format_help(self) -> str:
        """All of it for few options; else the most used ones and the names of the groups."""
        if not self._is_long():
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        counts = []
        for title, actions in self._groups():
            is_short = not title.endswith("Config") and len(actions) <= _MANY_IN_GROUP
            used = {flag for action in actions for flag in action.option_strings if not is_short}
            used &= set(MOST_USED)
            shown = [a for a in actions if is_short or used.intersection(a.option_strings)]
            _add_section(formatter, title, shown)
            if len(shown) < len(actions):
                counts.append(f"{title} ({len(actions)})")
        formatter.start_section("all options, by group")
        formatter.add_text(", ".join(counts))
        formatter.end_section()
        formatter.start_section("more help")
        formatter.add_text(
            f"{self.prog} --help=all, --help=GROUP (--help={counts[0].split()[0]}), --help=FLAG "
            "(--help=max-model-len), --help=env for environment variables, --help=TEXT to search"
            if counts
            else f"{self.prog} --help=all"
        )
        formatter.end_section()
        formatter.add_text(self.epilog)
        return self.format_usage() + "\n" + formatter.format_help()

    def help_on(self, topic: str) -> str | None:
        """Help for `all`, a group, a flag, or all that mentions the text; None if nothing does."""
        if topic == "all":
            return super().format_help()
        wanted = topic.lower().strip("-").replace("_", "-")
        groups = self._groups()
        for title, actions in groups:
            if wanted in (title.lower(), title.lower().removesuffix("config")):
                return self._sections([(title, actions)])
        found = [(title, [a for a in actions if _is_named(a, wanted)]) for title, actions in groups]
        if not any(actions for _, actions in found):
            text = topic.lower()
            found = [
                (title, [a for a in actions if _mentions(a, text)]) for title, actions in groups
            ]
        return self._sections(found) if any(actions for _, actions in found) else None

    def _sections(self, groups: list[tuple[str, list[argparse.Action]]]) -> str:
        formatter = self._get_formatter()
        for title, actions in groups:
            _add_section(formatter, title, actions)
        return formatter.format_help()

    def _groups(self) -> list[tuple[str, list[argparse.Action]]]:
        """Titles and visible actions of the groups that have any."""
        groups = []
        for group in self._action_groups:
            actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]
            if actions:
                groups.append((group.title or "options", actions))
        return groups

    def _is_long(self) -> bool:
        return len(self._get_optional_actions()) > _MANY_OPTIONS

    def _with_hint(self, message: str) -> str:
        unknown = re.search(r"unrecognized arguments: (.*)", message, re.DOTALL)
        flags = [word for word in unknown[1].split() if word.startswith("-")] if unknown else []
        if flags:
            return self.unknown_flag(flags[0])
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            names = re.findall(r"[\w.-]+", choice[2])
            near = difflib.get_close_matches(choice[1], names, n=1)
            return message + (f"; did you mean {near[0]}?" if near else "")
        return message

    def unknown_flag(self, word: str) -> str:
        """What to say of a flag that this parser lacks."""
        flag = re.split(r"[.=]", word, maxsplit=1)[0]
        options = self._all_options()
        if flag in KNOWN_FLAGS:  # spelled right: only what is almost the same can stand in for it
            near = difflib.get_close_matches(flag, options, n=1, cutoff=0.8)
            hint = f"; the nearest option there is: {near[0]}" if near else ""
            return f"{flag} is known but not implemented yet ({KNOWN_FLAGS[flag]}){hint}"
        near = difflib.get_close_matches(flag, options, n=1)
        return f"unrecognized arguments: {word}" + (f" (did you mean {near[0]}?)" if near else "")

    def _all_options(self) -> list[str]:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    if isinstance(parser, Parser):
                        options += parser._all_options()
        return options


def _add_section(
    formatter: argparse.HelpFormatter, title: str, actions: list[argparse.Action]
) -> None:
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()


def _is_named(action: argparse.Action, wanted: str) -> bool:
    return wanted in [flag.strip("-") for flag in action.option_strings]


def _mentions(action: argparse.Action, text: str) -> bool:
    dashed = text.replace("_", "-")
    return text in (action.help or "").lower() or any(dashed in f for f in action.option_strings)
