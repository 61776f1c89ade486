"""Checks clients' grammars before a worker gets them: their depth and, in a separate process, whether they compile."""

from gateway.grammars.check import GrammarCheck
from gateway.grammars.process import CompileProcess, process_arguments

__all__ = ["CompileProcess", "GrammarCheck", "process_arguments"]
