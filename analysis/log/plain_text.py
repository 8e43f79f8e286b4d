"""Text from a log, made safe to print. Pure."""


def plain(text: str) -> str:
    """One line without control characters, whatever a log holds."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
