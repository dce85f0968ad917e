"""Every setting of a run: its default, help and check, and presets, the defaults that follow from other settings.

Data, models and tasks read settings, so this package is below them. ``settings`` declares one setting, ``bases`` has
the base optimizers, ``presets`` the presets, ``task_settings`` the settings of the tasks, ``run_config`` those of a
run, and ``digest`` the end of the name of its directory.
"""

from .presets import SET as SET
from .presets import Preset as Preset
from .run_config import BASE as BASE
from .run_config import RADIUS_SCHEDULE as RADIUS_SCHEDULE
from .run_config import Run as Run
from .run_config import arguments_of as arguments_of
from .run_config import default_settings as default_settings
from .run_config import imported as imported
from .run_config import method_title as method_title
from .run_config import preset_values as preset_values
from .run_config import settings_by_heading as settings_by_heading
from .settings import MAX_SEED as MAX_SEED
from .settings import Check as Check
from .settings import Split as Split
from .settings import setting as setting
from .settings import to_json_value as to_json_value
from .task_settings import FINE_TUNING as FINE_TUNING
from .task_settings import QUANTIZED as QUANTIZED
from .task_settings import TASK_SETTINGS as TASK_SETTINGS
from .task_settings import ClassificationSettings as ClassificationSettings
from .task_settings import NoiseLabels as NoiseLabels
from .task_settings import PoseSettings as PoseSettings
from .task_settings import TaskSettings as TaskSettings
from .task_settings import is_own_task as is_own_task
from .task_settings import settings_of_task as settings_of_task
from .task_settings import store_settings as store_settings
