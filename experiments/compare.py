"""`zenflow-compare`: compose two configurations with Hydra that differ in their engines, and compare them."""

import re
import sys
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from zenflow.compare.config import CompareConfig, words_of
from zenflow.training.command import run_command, run_job
from zenflow.training.errors import InputError

NAME = "zenflow-compare"
HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "compare.yaml").is_file())


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="compare")
def job(cfg: DictConfig) -> float:
    from zenflow.compare.run import compare

    try:
        words = {side: words_of(side, cfg[side]) for side in ("a", "b")}
    except InputError as error:
        sys.exit(f"{NAME}: {error}")
    shared = list(HydraConfig.get().overrides.task)
    sides = {side: OmegaConf.to_object(compose("compare", [*shared, *words[side]])) for side in words}
    told = {side: " ".join(words[side]) for side in words}
    return run_job(lambda config, folder, **how: compare(sides, told, folder, **how), cfg, NAME)


def quoted(word: str) -> str:
    """a=engine=zenflow as a='engine=zenflow': what Hydra wants, and a shell takes away."""
    found = re.fullmatch(r"([ab])=([^'\"].*)", word, flags=re.S)
    if found is None:
        return word
    value = found[2].replace("'", r"\'")
    return f"{found[1]}='{value}'"


def main() -> None:
    ConfigStore.instance().store(name="base_compare", node=CompareConfig)
    sys.argv[1:] = [quoted(word) for word in sys.argv[1:]]
    run_command(job, NAME)


if __name__ == "__main__":
    main()
