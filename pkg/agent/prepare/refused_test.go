// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// refusal is a setting that a GPU refuses for ever.
type refusal struct {
	// before is the state of GPU 0 when claims come; it refuses the setting from then on.
	before  []nvmlsim.Command
	noPower bool // persistence mode is off
	refuses nvmlsim.Setting
	shares  config.Strategy // of the node
	daemons func(sharing.Daemons) sharing.Daemons
	// claim of that name wants the setting, which want says.
	claim func(name string) *resourceapi.ResourceClaim
	want  string
	// unrecorded: it is found out before anything is recorded.
	unrecorded bool
	// next can have the GPU.
	next func(name string) *resourceapi.ResourceClaim
}

var longSlices = sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`)

func wholeWith(parameters string) func(name string) *resourceapi.ResourceClaim {
	return func(name string) *resourceapi.ResourceClaim {
		c := claim(name, "gpu="+gpu0)
		if parameters != "" {
			withConfig(c, driverName, parameters)
		}
		return c
	}
}

// unstartable daemons are found not to be there only when one is started. What is left of it is not known, either.
type unstartable struct{ sharing.Daemons }

func (d unstartable) Start(context.Context, sharing.Daemon) error {
	return errors.New("the unit is masked")
}

// noSystemd is a node where nothing is known of any daemon.
type noSystemd struct{ sharing.Daemons }

var errNoSystemd = errors.New("the host has not been booted with systemd")

func (noSystemd) Check(context.Context, sharing.Daemon) error { return errNoSystemd }
func (noSystemd) Start(context.Context, sharing.Daemon) error { return errNoSystemd }
func (noSystemd) Stop(context.Context, string) error          { return errNoSystemd }

var refusals = map[string]refusal{
	"time slices": {
		unrecorded: true,
		refuses:    nvmlsim.SettingTimeSlice, claim: wholeWith(longSlices),
		want: `sharing.timeSlicingConfig.interval: "Long"`, next: wholeWith(""),
	},
	"time slices, and the compute mode was changed before": {
		unrecorded: true,
		before:     []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}},
		refuses:    nvmlsim.SettingTimeSlice, claim: wholeWith(longSlices),
		want: `sharing.timeSlicingConfig.interval: "Long"`, next: wholeWith(""),
	},
	"time slices of a share": {
		unrecorded: true,
		refuses:    nvmlsim.SettingTimeSlice,
		claim:      func(name string) *resourceapi.ResourceClaim { return sharedBy(name, "20Gi:25", longSlices) },
		want:       `sharing.timeSlicingConfig.interval: "Long"`, next: wholeWith(""),
	},
	"exclusive use": {
		refuses: nvmlsim.SettingComputeMode, claim: wholeWith(sharingConfig("GpuConfig", "Exclusive", "")),
		want: `sharing.strategy: "Exclusive"`, next: wholeWith(""),
	},
	"an administrator's exclusive mode cannot be changed": {
		before:  []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}},
		refuses: nvmlsim.SettingComputeMode, claim: wholeWith(""),
		want: "ComputeMode", next: wholeWith(sharingConfig("GpuConfig", "Exclusive", "")),
	},
	"persistence, which a setting needs": {
		noPower: true,
		refuses: nvmlsim.SettingPersistence, claim: wholeWith(sharingConfig("GpuConfig", "Exclusive", "")),
		want: "Persistence", next: wholeWith(""),
	},
	"MPS": {
		unrecorded: true,
		refuses:    nvmlsim.SettingMPS, claim: wholeWith(underMPS),
		want: `sharing.strategy: "MPS"`, next: wholeWith(""),
	},
	"MPS of a share": {
		unrecorded: true,
		refuses:    nvmlsim.SettingMPS,
		claim:      func(name string) *resourceapi.ResourceClaim { return sharedBy(name, "20Gi:25", underMPS) },
		want:       `sharing.strategy: "MPS"`, next: wholeWith(""),
	},
	"MPS, by the compute mode": {
		refuses: nvmlsim.SettingComputeMode, claim: wholeWith(underMPS),
		want: `sharing.strategy: "MPS"`, next: wholeWith(""),
	},
	"MPS on a node that cannot have daemons": {
		daemons: func(d sharing.Daemons) sharing.Daemons { return noSystemd{d} }, claim: wholeWith(underMPS),
		want: `sharing.strategy: "MPS"`, next: wholeWith(""), unrecorded: true,
	},
	"MPS, by the compute mode, and it was not begun to start a daemon": {
		daemons: func(d sharing.Daemons) sharing.Daemons { return &stuckDaemons{Daemons: d, stuck: true} },
		refuses: nvmlsim.SettingComputeMode, claim: wholeWith(underMPS),
		want: `sharing.strategy: "MPS"`, next: wholeWith(""),
	},
	"MPS, at the start of the daemon": {
		daemons: func(d sharing.Daemons) sharing.Daemons { return unstartable{d} }, claim: wholeWith(underMPS),
		want: `sharing.strategy: "MPS"`, next: wholeWith(""),
	},
}

// start is a machine on which the setting is refused.
func (r *refusal) start(t *testing.T) *node {
	t.Helper()
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = r.shares
	n.do(r.before...)
	if r.noPower {
		d, ret := n.hardware.handle.Raw.DeviceGetHandleByIndex(0)
		if ret == nvml.SUCCESS {
			ret = d.SetPersistenceMode(nvml.FEATURE_DISABLED)
		}
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
	}
	if r.refuses != "" {
		n.do(&nvmlsim.Refuse{GPU: "0", Settings: []nvmlsim.Setting{r.refuses}})
	}
	if _, err := n.tryManager(); err != nil { // the folders are part of the state before
		t.Fatal(err)
	}
	return n
}

func (r *refusal) tools(n *node) {
	if r.daemons != nil {
		n.tools.Daemons = r.daemons(n.tools.Daemons)
	}
}

// served checks that nothing is left of who was refused, and that the next claim gets the GPU at once.
func (r *refusal) served(t *testing.T, n *node, m *prepare.Manager, before machineState) {
	t.Helper()
	if list, err := m.Quarantined(); err != nil || len(list) > 0 {
		t.Errorf("in quarantine: %+v, %v", list, err)
	}
	if diff := before.diff(n.state()); diff != "" {
		t.Errorf("the machine (-before the claims +after):\n%s", diff)
	}
	for _, name := range []string{"next", "last"} {
		if _, err := m.Prepare(n.ctx, r.next(name)); err != nil {
			t.Errorf("the %s claim: %v", name, err)
		}
		n.unprepare(m, r.next(name).UID)
	}
}

// TestARefusedSettingTakesNoGPUOutOfService: the claim is told which one, and the next one gets the GPU.
func TestARefusedSettingTakesNoGPUOutOfService(t *testing.T) {
	for name, r := range refusals {
		t.Run(name, func(t *testing.T) {
			n := r.start(t)
			r.tools(n)
			before := n.state()
			m := n.manager()
			for i := range 3 {
				for range 2 { // the kubelet tries again
					_, err := m.Prepare(n.ctx, r.claim(fmt.Sprint("pod-", i)))
					if err == nil || !strings.Contains(err.Error(), r.want) {
						t.Fatalf("error %v, want one that says %q", err, r.want)
					}
					if !strings.HasPrefix(r.want, "sharing.") && strings.Contains(err.Error(), "sharing.") {
						t.Errorf("error %v blames a parameter", err)
					}
				}
			}
			r.served(t, n, m, before)
		})
	}
}

// TestARefusedSettingIsForgottenByTheNextAgent: the one that was refused has ended at some step.
func TestARefusedSettingIsForgottenByTheNextAgent(t *testing.T) {
	for name, r := range refusals {
		t.Run(name, func(t *testing.T) {
			count := &durabletest.Faulty{FS: durabletest.Unsynced{}}
			disturbed := func(faulty *durabletest.Faulty) (n *node, before machineState) {
				n = r.start(t)
				before = n.state()
				n.disturb(faulty)
				r.tools(n)
				if m, err := n.tryManager(); err == nil {
					if _, err := m.Prepare(n.ctx, r.claim("pod")); err == nil {
						t.Fatal("it is not refused")
					}
				}
				return n, before
			}
			disturbed(count)
			if recorded := slices.ContainsFunc(count.Steps(), func(step string) bool { return strings.Contains(step, ".claim") }); recorded == r.unrecorded {
				t.Errorf("recorded: %v; steps %v", recorded, count.Steps())
			}
			for at, step := range count.Steps() {
				for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter} {
					t.Run(fmt.Sprintf("%v/%02d %s", mode, at+1, stepLabel(step)), func(t *testing.T) {
						n, before := disturbed(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: mode, At: at + 1})
						n.restart()
						m := n.manager()
						if _, err := m.Recover(n.ctx); err != nil {
							t.Fatal(err)
						}
						r.served(t, n, m, before)
					})
				}
			}
		})
	}
}

// TestAPlainClaimNeedsNoPersistence: without settings the driver has nothing to forget.
func TestAPlainClaimNeedsNoPersistence(t *testing.T) {
	r := refusals["persistence, which a setting needs"]
	n := r.start(t)
	before := n.state()
	m := n.manager()
	for _, c := range []*resourceapi.ResourceClaim{wholeWith("")("whole"), sharedBy("share", "20Gi:25", "")} {
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
		n.unprepare(m, c.UID)
	}
	if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the machine (-before the claims +after):\n%s", diff)
	}
}
