from .errors import ConfigError as ConfigError
from .errors import LaunchError as LaunchError
from .errors import NotebookAccelError as NotebookAccelError
from .errors import RunStopped as RunStopped
from .errors import WorkerError as WorkerError
from .notebook.launcher import notebook_launcher as notebook_launcher
