"""`zenflow-train`: compose a run's configuration with Hydra, and train."""

from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig

from zenflow.training.command import given_settings, run_command, run_job

HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "train.yaml").is_file())


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(cfg: DictConfig) -> float:
    from zenflow.training.run import train

    return run_job(partial(train, given=given_settings()), cfg)


def table_of_jobs(sweep: Path) -> None:
    from zenflow.report.sweep import summarise_sweep

    summarise_sweep(sweep)


def main() -> None:
    run_command(job, after_sweep=table_of_jobs)


if __name__ == "__main__":
    main()
