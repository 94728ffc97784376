"""Errors that a user can mend. The command line prints them as one line and exits with 2."""


class UserError(Exception):
    """Something outside the program is wrong: a setting, a file, a missing extra.

    The message is one line and says what is wrong, what is allowed and how to mend it.
    """


class DataError(UserError):
    """A data file that does not hold what it should; names the file and the place in it."""


class SettingError(UserError, ValueError):
    """A setting with a value that is not allowed.

    Args:
        setting: its dotted name in the config, as an override spells it (``mixer.num_components``).
        value: what it was.
        allowed: what it may be.
        fix: an override that mends it (``mixer.num_components=64``).
    """

    def __init__(self, setting: str, value: object, allowed: str, fix: str) -> None:
        self.setting, self.value, self.allowed, self.fix = setting, value, allowed, fix
        super().__init__(f"{setting}={value}: {allowed}. Try: {fix}")

    def __reduce__(self) -> tuple[object, ...]:  # crosses process borders in launchers
        return type(self), (self.setting, self.value, self.allowed, self.fix)


class MissingExtra(UserError, ImportError):
    """An optional dependency that is not installed; names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.args_ = (package, extra, purpose)
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Try: pip install 'gma-bench[{extra}]'"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args_
