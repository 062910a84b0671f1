"""The engine: `initialize` composes it, `Engine` is what users drive."""

from infinity.engine.build import Initialized, initialize
from infinity.engine.engine import Engine
from infinity.engine.lifetime import EngineState
from infinity.engine.results import StepResult

__all__ = ["Engine", "EngineState", "Initialized", "StepResult", "initialize"]
