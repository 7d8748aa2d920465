"""`zenflow-diagnose`: compose a run's configuration with Hydra, and say what limits it."""

from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from zenflow.diagnose.config import DiagnoseConfig
from zenflow.training.command import run_command, run_job

NAME = "zenflow-diagnose"
HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "diagnose.yaml").is_file())


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="diagnose")
def job(cfg: DictConfig) -> float:
    from zenflow.diagnose.run import diagnose

    return run_job(diagnose, cfg, NAME)


def main() -> None:
    ConfigStore.instance().store(name="base_diagnose", node=DiagnoseConfig)
    run_command(job, NAME)


if __name__ == "__main__":
    main()
