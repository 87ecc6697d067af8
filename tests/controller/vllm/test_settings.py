"""Settings of the vLLM connector, the JSON for its command line, and that none of it needs vLLM."""

import json
import subprocess
import sys

import pytest

from hicache_controller.integrations.storage_address import storage_address
from hicache_controller.integrations.vllm import VllmSettings, kv_transfer_config


def test_the_configuration_holds_what_was_set_and_comes_back_as_settings():
    settings = VllmSettings(l2_gb=64, storage="file:///mnt/l3", storage_options={"capacity_bytes": 10**12})
    config = json.loads(json.dumps(kv_transfer_config(settings)))
    assert config == {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache_controller.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "l2_gb": 64,
            "storage": "file:///mnt/l3",
            "storage_options": {"capacity_bytes": 10**12},
        },
    }
    assert VllmSettings.of(config["kv_connector_extra_config"]) == settings


def test_keys_that_vllm_reads_itself_are_passed_on():
    VllmSettings.of({"l2_gb": 1, "spec_name": "x", "spec_module_path": "y", "self_describing_kv_events": True})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "l2_gb is 0"),
        ({"l2_gb": -1}, "l2_gb"),
        ({"l2_gb": "64"}, "l2_gb"),
        ({"l2_gb": 1, "l2_size": 4}, "has l2_size; accepted are l2_gb"),
        ({"l2_gb": 1, "eviction": "arc"}, "eviction is 'arc'"),
        ({"l2_gb": 1, "storage": "s3://bucket"}, "storage is 's3://bucket'"),
        ({"l2_gb": 1, "storage": "file://relative"}, "storage is 'file://relative'"),
        ({"l2_gb": 1, "storage": "mooncake://"}, "storage is 'mooncake://'"),
        ({"l2_gb": 1, "storage": "file:///a?b=1"}, "storage_options, not in the address"),
        ({"l2_gb": 1, "storage": ""}, "storage is ''"),
        ({"l2_gb": 1, "storage_options": {"a": 1}}, "without storage"),
        ({"l2_gb": 1, "storage_wait_seconds": 0}, "storage_wait_seconds"),
        ({"l2_gb": 1, "offload_prompt_only": 1}, "offload_prompt_only is 1"),
        ({"l2_blocks": 0}, "l2_blocks"),
        ({"l2_gb": 1, "min_load_tokens": 0}, "min_load_tokens"),
        ({"l2_gb": 1, "min_load_tokens": 1.5}, "min_load_tokens"),
        ({"l2_gb": 1, "prefill_tokens_per_second": 0}, "prefill_tokens_per_second"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        VllmSettings.of(wrong)


def test_addresses_of_storage():
    assert storage_address("file:///mnt/l3") == ("file", {"directory": "/mnt/l3"})
    assert storage_address("mooncake://10.0.0.1:50051") == ("mooncake", {"master": "10.0.0.1:50051"})
    assert storage_address("my.module:Class") == ("my.module:Class", {})


def test_blocks_of_the_host():
    assert VllmSettings(l2_gb=1).blocks(2 << 20) == 476
    assert VllmSettings(l2_blocks=7).blocks(2 << 20) == 7
    with pytest.raises(ValueError, match="one block of this model has 2"):
        VllmSettings(l2_gb=1).blocks(2 * 10**9)


def test_settings_need_no_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from hicache_controller.integrations.vllm import VllmSettings\n"
        "VllmSettings(l2_gb=1)\n"
        "try:\n"
        "    from hicache_controller.integrations.vllm import HiCacheConnector\n"
        "except ImportError as error:\n"
        "    assert 'vLLM is not installed' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache_controller.tools.cli", "vllm-config", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_prints_one_line_of_json():
    options = ("--storage", "file:///mnt/l3", "--storage-option", "capacity_bytes=1000", "--eviction", "slru")
    printed = run_command("--l2-gb", "64", *options)
    assert printed.returncode == 0, printed.stderr
    (line,) = printed.stdout.splitlines()
    extra = json.loads(line)["kv_connector_extra_config"]
    assert extra == {
        "l2_gb": 64.0,
        "eviction": "slru",
        "storage": "file:///mnt/l3",
        "storage_options": {"capacity_bytes": 1000},
    }


def test_the_command_names_what_is_wrong():
    printed = run_command("--l2-gb", "64", "--storage", "s3://bucket")
    assert (printed.returncode, printed.stdout) == (2, "")
    assert "storage is 's3://bucket'; accepted are file:///directory" in " ".join(printed.stderr.split())
