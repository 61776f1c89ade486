"""Clients' grammars, checked before a worker sees them: their depth, and in another process whether they compile."""

from gateway.grammars.check import GrammarCheck
from gateway.grammars.process import CompileProcess, process_arguments

__all__ = ["CompileProcess", "GrammarCheck", "process_arguments"]
