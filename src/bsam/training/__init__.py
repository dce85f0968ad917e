"""One run: its settings, its loop, its directory."""

from ..tasks import Task as Task
from .config import FINE_TUNING as FINE_TUNING
from .config import POSE as POSE
from .config import Run as Run
from .export import ExportedNetwork as ExportedNetwork
from .export import export_run as export_run
from .loop import fit as fit
from .pose_prediction import FoundJoints as FoundJoints
from .pose_prediction import find_joints as find_joints
from .prediction import Prediction as Prediction
from .prediction import predict as predict
