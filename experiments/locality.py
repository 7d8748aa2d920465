"""`zenflow-locality`: compose a run's configuration with Hydra, train, and tell how local its gradients are."""

from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from zenflow.locality.config import LocalityConfig
from zenflow.training.command import run_command, run_job

NAME = "zenflow-locality"
HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "locality.yaml").is_file())


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="locality")
def job(cfg: DictConfig) -> float:
    from zenflow.locality.run import study_locality

    return run_job(study_locality, cfg, NAME)


def main() -> None:
    ConfigStore.instance().store(name="base_locality", node=LocalityConfig)
    run_command(job, NAME)


if __name__ == "__main__":
    main()
