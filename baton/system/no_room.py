"""What to do if the system has no room for a further thread, process or file."""

REMEDY = (
    "raise the limits of threads, open files and memory "
    "(`ulimit -u`, `ulimit -n`, `ulimit -v`, the pids limit of a container)"
)


def in_words(error: Exception) -> str:
    """The error's type and text. If no thread could start, also says what to do."""
    words = f"{type(error).__name__}: {error}"
    is_about_threads = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    return f"{words}; {REMEDY}" if is_about_threads else words
