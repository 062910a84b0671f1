"""The engine: `initialize` composes it, `Engine` is what users drive."""

from infinity.engine.engine import Engine
from infinity.engine.initialize import Initialized, initialize
from infinity.engine.launch import add_config_arguments, init_distributed
from infinity.engine.lifetime import EngineState
from infinity.engine.results import StepResult

__all__ = ["Engine", "EngineState", "Initialized", "StepResult", "add_config_arguments", "init_distributed", "initialize"]
