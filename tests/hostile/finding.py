"""What a scene found: one row of the table at the end."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Finding:
    """A scene's result. It is right unless something was noted as wrong."""

    scene: str
    seen: dict[str, object] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        """Notes `what` as wrong unless it holds."""
        if not holds:
            self.wrong.append(what)

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{'ok   ' if not self.wrong else 'WRONG'} {self.scene}"]
        lines += [f"        {name}: {value}" for name, value in self.seen.items()]
        lines += [f"      wrong: {what}" for what in self.wrong]
        return "\n".join(lines)
