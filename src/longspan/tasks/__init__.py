"""Tasks: data, batches and metrics; needs longspan[train]. TASKS is the one table of them."""

from longspan.attention import checks
from longspan.tasks.base import Batch, Data, Examples, Task
from longspan.tasks.glue import TASKS as GLUE
from longspan.tasks.imdb import IMDB
from longspan.tasks.lra import LRA
from longspan.tasks.mlm import MLM, MLM_SOP

__all__ = ["TASKS", "Batch", "Data", "Examples", "Task", "find"]

TASKS: dict[str, Task] = {task.name: task for task in (MLM, MLM_SOP, *GLUE, IMDB, *LRA)}


def find(name: str) -> Task:
    """The row of a task; an unknown name is an error that names the nearest."""
    checks.choice("task", name, TASKS)
    return TASKS[name]
