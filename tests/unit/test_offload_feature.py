"""What the feature of offloading gives to the compiler, and what features together answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import quintnet
from quintnet_compiler.features import FEATURES
from quintnet_compiler.features.answers import completed, host_state, is_allowed, memory_savers, savers_together
from quintnet_compiler.features.feature import MemorySaver
from quintnet_compiler.features.offload.activations import OffloadActivations
from quintnet_compiler.features.offload.disk_copies import DiskCopies
from quintnet_compiler.features.offload.feature import OFFLOAD, stages_alone
from quintnet_compiler.features.offload.parameters import OffloadParameters
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.plans.feature_fields import OfFeature, check_feature_fields
from quintnet_compiler.ir.plans.host_state import HostState
from quintnet_compiler.ops.copies import copy_out, write_out
from quintnet_compiler.ops.extensions import extension, extensions_of
from quintnet_compiler.runtime.execute.extensions import RankMethod, methods_of
from quintnet_compiler.schedules.kinds import gpipe, one_f_one_b

from ..feature_settings import setting_of

ACTIVATIONS, PARAMETERS = OFFLOAD.rewrites
FILES = Plan(offload=("activations",), offload_folder="/nvme")


def test_it_is_listed_and_rewrites_what_a_plan_names() -> None:
    assert OFFLOAD in FEATURES
    schedule = one_f_one_b(2, 4)
    in_memory = setting_of(Plan(offload=("activations", "optimizer")), schedule)
    rewrite, in_files = (ACTIVATIONS.make(setting, None) for setting in (in_memory, setting_of(FILES, schedule)))
    assert isinstance(rewrite, OffloadActivations) and rewrite.out is copy_out and rewrite.alone == {1}
    assert isinstance(in_files, OffloadActivations) and in_files.out is write_out
    assert PARAMETERS.make(in_memory, None) is None
    assert PARAMETERS.make(setting_of(Plan(offload=("parameters",))), None) == OffloadParameters()
    for setting in (setting_of(Plan(), schedule), setting_of(FILES, schedule, training=False)):
        assert ACTIVATIONS.make(setting, None) is None and ACTIVATIONS.leaving(setting, None) is None


def test_stages_are_alone_where_a_backward_follows_its_forward() -> None:
    assert stages_alone(one_f_one_b(2, 4)) == {1} and stages_alone(gpipe(2, 4)) == frozenset()
    assert stages_alone(one_f_one_b(1, 1)) == {0}


def test_hosts_hold_what_a_plan_offloads() -> None:
    assert host_state(Plan()) == HostState() and not host_state(Plan()).updates
    assert host_state(FILES) == HostState(values=True, folder="/nvme")
    assert host_state(Plan(offload=("parameters",))) == HostState(parameters=True)
    assert host_state(Plan(offload=("optimizer",))).updates
    joined = HostState(values=True) | HostState(optimizer=True, folder="/nvme")
    assert joined == HostState(values=True, optimizer=True, folder="/nvme") == joined | HostState(folder="/other")


def test_a_plan_that_does_not_fit_itself_is_refused() -> None:
    with pytest.raises(quintnet.CompileError, match=r'offload=\("parameters",\) with zero=1'):
        check_feature_fields(Plan(offload=("parameters",), zero=1), searched=True)
    folder = Plan(offload_folder="/nvme")
    with pytest.raises(quintnet.CompileError, match="no activations leave the device"):
        check_feature_fields(folder)
    assert is_allowed(folder) and completed(folder) == Plan(), "a planner leaves the folder out"
    assert completed(FILES) == FILES
    assert not is_allowed(Plan(offload=("parameters",), zero=2)) and is_allowed(Plan(offload=("parameters",), zero=3))


def test_a_field_of_no_installed_feature_is_refused() -> None:
    class Decisions(Plan):
        depth: int = 1

    Decisions.model_fields["depth"].metadata.append(OfFeature)
    check_feature_fields(Decisions())
    with pytest.raises(quintnet.CompileError, match="depth=2 belongs to a feature that is not installed"):
        check_feature_fields(Decisions(depth=2))


def test_planners_try_each_saver_alone_and_then_two_together() -> None:
    alone, together = memory_savers(), savers_together()
    assert [saver.decisions for saver in alone[:3]] == [
        {"loss_chunks": 8}, {"loss_chunks": 64}, {"offload": ("activations",)},
    ]  # fmt: skip
    assert together == tuple(alone[0] & saver for saver in OFFLOAD.memory_savers)
    both = MemorySaver("a", {"x": 1}, in_functions=True) & MemorySaver("b", {"y": 2})
    assert both == MemorySaver("a, and b", {"x": 1, "y": 2})


def test_ranks_that_write_files_run_other_operators() -> None:
    said = extension(write_out, RankMethod)
    assert said is not None and extensions_of(RankMethod)[write_out] is said and extension(copy_out, RankMethod) is None
    program = SimpleNamespace(disk=None)
    assert DiskCopies.of_rank(program, 0, torch.device("cpu"), None) is None  # type: ignore[arg-type]


def test_a_service_runs_the_operators_that_name_it() -> None:
    service = SimpleNamespace(drop_values=lambda: None)
    assert methods_of({}) == {}
    methods = methods_of({DiskCopies.of_rank: service})
    assert methods.keys() == {"write_out", "read_in", "start_write_out", "start_read_in"}
    assert methods["read_in"].func is DiskCopies.read_in and methods["read_in"].args == (service,)  # type: ignore[attr-defined]
