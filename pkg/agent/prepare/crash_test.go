// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"bytes"
	gocmp "cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// everyNth leaves out processes to be killed, each of which has to start: TestAFaultAtAnyStepIsRecovered tries all steps, or every fourth
// with the race detector.
var everyNth = flag.Int("every", 5, "kill a process at every n-th place only")

// scenario is a claim whose preparation is disturbed at every step.
type scenario struct {
	claim func() *resourceapi.ResourceClaim
	// profile of the machine, twoGPUs if empty.
	profile string
	// shares is how the node shares its GPUs, by time slices if empty.
	shares config.Strategy
	// before is the state of the machine that the claim finds.
	before []nvmlsim.Command
	// beside, if it is set, is a claim for the same GPU that is prepared before, and stays so.
	beside func() *resourceapi.ResourceClaim
	// other is a claim for the same GPU, which gets it when this one is rolled back.
	other result
}

var scenarios = map[string]scenario{
	"passthrough":                     passthrough,
	"passthrough beside persistenced": besidePersistenced,
	"whole GPU": {
		claim: func() *resourceapi.ResourceClaim { return claim("train", "gpu="+gpu0) },
		other: "gpu=" + gpu0,
	},
	"time-slicing": {
		claim: func() *resourceapi.ResourceClaim {
			return withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`))
		},
		// An administrator's setting, which is restored in the end.
		before: []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}},
		other:  "gpu=" + gpu0,
	},
	"MPS": {
		claim: func() *resourceapi.ResourceClaim {
			return withConfig(claim("train", "gpu="+gpu0, "more="+gpu1), driverName,
				sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`))
		},
		other: "gpu=" + gpu0,
	},
	"MIG": {
		claim: func() *resourceapi.ResourceClaim {
			return claim("train", "small="+gpu0+"-mig-1g10gb-0", "large="+gpu0+"-mig-3g40gb-4", "far="+gpu1+"-mig-7g80gb-0")
		},
		// GPU 1 has been switched by an administrator, and stays so.
		before: []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "1", Enabled: true}},
		other:  "gpu=" + gpu0,
	},
	"share": {
		shares: config.MPS,
		claim:  func() *resourceapi.ResourceClaim { return sharedBy("train", "20Gi:25", "") },
		other:  "gpu=" + gpu0,
	},
	"share beside another": {
		shares: config.MPS,
		claim:  func() *resourceapi.ResourceClaim { return sharedBy("train", "20Gi:25", "") },
		beside: func() *resourceapi.ResourceClaim { return sharedBy("beside", "30Gi:50", "") },
		other:  "gpu=" + gpu0 + "+share:other:49Gi:50",
	},
}

var underMPS = sharingConfig("GpuConfig", "MPS", "")

// sharedBy is a claim with a share of GPU 0, of that memory and percent, and with parameters.
func sharedBy(name, amount, parameters string) *resourceapi.ResourceClaim {
	c := claim(name, result("gpu="+gpu0+"+share:"+name+"-share:"+amount))
	if parameters != "" {
		withConfig(c, driverName, parameters)
	}
	return c
}

func (s scenario) machine() string { return gocmp.Or(s.profile, twoGPUs) }

// operation is prepare or unprepare of the scenario's claim.
type operation string

const (
	preparing   operation = "prepare"
	unpreparing operation = "unprepare"
)

// run is what an agent does after its start.
func (s *scenario) run(n *node, op operation) error {
	n.rules.Shares = s.shares
	m, err := n.tryManager()
	if err != nil {
		return err
	}
	if op == unpreparing {
		return m.Unprepare(n.ctx, s.claim().UID)
	}
	_, err = m.Prepare(n.ctx, s.claim())
	return err
}

// start brings a new machine to where the operation begins.
func (s *scenario) start(t *testing.T, n *node, op operation) {
	t.Helper()
	n.rules.Shares = s.shares
	n.do(s.before...)
	n.hardware.discover(t, n.hardware.policy)
	if s.beside != nil {
		if _, err := n.manager().Prepare(n.ctx, s.beside()); err != nil {
			t.Fatal(err)
		}
	}
	if op == unpreparing {
		if err := s.run(n, preparing); err != nil {
			t.Fatal(err)
		}
	}
}

// disturb lets the agent's file operations, and what it does to hardware, go through faulty.
func (n *node) disturb(faulty *durabletest.Faulty) {
	n.fsys = faulty
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return faultyDevice{d, faulty} }
	tools := sharing.NewSimulated(n.hardware.machine)
	n.pci = faultyKernel{n.hardware.kernel, faulty}
	n.tools = sharing.Tools{
		TimeSlicer: faultySlicer{tools.TimeSlicer, faulty}, Daemons: faultyDaemons{tools.Daemons, faulty}, Processes: tools.Processes,
		Persistenced: faultyPersistenced{tools.Persistenced, faulty},
	}
}

// restart is an agent on the same machine, undisturbed.
func (n *node) restart() {
	n.fsys = n.disk
	n.hardware.wrap, n.hardware.readings, n.pci = nil, nil, nil
	n.tools = sharing.NewSimulated(n.hardware.machine)
}

// undisturbed returns the steps of the operation, and the machine's state before and after it.
func (s *scenario) undisturbed(t *testing.T, op operation) (steps []string, before, after machineState) {
	t.Helper()
	n := newNodeOf(t, s.machine())
	s.start(t, n, op)
	if _, err := n.tryManager(); err != nil { // the folders are part of the state before
		t.Fatal(err)
	}
	before = n.state()
	faulty := &durabletest.Faulty{FS: durabletest.Unsynced{}}
	n.disturb(faulty)
	if err := s.run(n, op); err != nil {
		t.Fatal(err)
	}
	n.restart()
	return faulty.Steps(), before, n.state()
}

// starting is how an agent starts on the machine after the disturbance. When it is done nothing of it may be left to do.
type starting func(t *testing.T, n *node, op operation) (*prepare.Manager, prepare.Recovery)

// seeing is an agent that has seen the GPUs before it reads the ledger.
func (s *scenario) seeing(t *testing.T, n *node, _ operation) (*prepare.Manager, prepare.Recovery) {
	t.Helper()
	if s.profile == withSound {
		n.hardware.discover(t, n.hardware.policy) // it must see GPUs that come back
	}
	m := n.manager()
	recovery, err := m.Recover(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if recovery.Quarantined > 0 {
		t.Errorf("after the restart %d GPUs are in quarantine", recovery.Quarantined)
	}
	return m, recovery
}

// blind is an agent as package driver starts it: NVML is not open yet when it reads the ledger and, if the kubelet is quick, when it
// unprepares. What cannot be undone without NVML is when it has been opened; owed is how many GPUs waited for that.
func (s *scenario) blind(t *testing.T, n *node, op operation) (m *prepare.Manager, recovery prepare.Recovery, owed int) {
	t.Helper()
	n.hardware.reopen(t)
	m = n.manager()
	policy := n.hardware.policy
	policy.Ours = m.Made
	n.hardware.Offer(policy)
	recovery, err := m.Recover(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if op == unpreparing {
		if err := m.Unprepare(n.ctx, s.claim().UID); err != nil {
			t.Fatalf("unprepare without NVML: %v", err)
		}
	}
	quarantined, err := m.Quarantined()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.hardware.Discover(n.ctx); err != nil {
		t.Fatal(err)
	}
	now, err := m.Reconcile(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if now.Quarantined > 0 {
		t.Errorf("after NVML was opened %d GPUs are in quarantine", now.Quarantined)
	}
	return m, recovery, len(quarantined)
}

// check starts an agent on the machine after the disturbance, lets the kubelet try again, and compares with
// what an undisturbed run leaves. result is the disturbed operation's.
func (s *scenario) check(t *testing.T, n *node, op operation, result error, before, after machineState, start starting) {
	t.Helper()
	n.restart()
	m, recovery := start(t, n, op)
	uid, besides := s.claim().UID, 0
	if s.beside != nil {
		besides = 1
	}
	if op == preparing {
		if result == nil && recovery.Claims != 1+besides {
			t.Errorf("prepare reported success, after the restart: %+v", recovery)
		}
		if recovery.Claims == besides {
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("after the roll-back (-before the claim +now):\n%s", diff)
			}
			// The kubelet may also never come back with this claim.
			if _, err := m.Prepare(n.ctx, s.another("other")); err != nil {
				t.Errorf("another claim for the GPU: %v", err)
			}
			if err := m.Unprepare(n.ctx, "other-uid"); err != nil {
				t.Error(err)
			}
		}
		if _, err := m.Prepare(n.ctx, s.claim()); err != nil {
			t.Fatalf("retry: %v", err)
		}
		if diff := after.diff(n.state()); diff != "" {
			t.Errorf("after the retry (-undisturbed +now):\n%s", diff)
		}
		after = before // TestUnprepareLeavesTheMachineAsPrepareFoundIt
	}
	if err := m.Unprepare(n.ctx, uid); err != nil {
		t.Fatalf("unprepare: %v", err)
	}
	if diff := after.diff(n.state()); diff != "" {
		t.Errorf("after unprepare (-undisturbed +now):\n%s", diff)
	}
	if _, err := m.Prepare(n.ctx, s.another("next")); err != nil {
		t.Errorf("the next claim for the GPU: %v", err)
	}
	if s.beside == nil {
		return
	}
	// The last of those that share the GPU leaves nothing of what all of them have done.
	for _, claim := range []types.UID{s.beside().UID, "next-uid"} {
		if err := m.Unprepare(n.ctx, claim); err != nil {
			t.Error(err)
		}
	}
	untouched := newNodeOf(t, twoGPUs)
	untouched.do(s.before...)
	if diff := untouched.state().diff(n.state()); diff != "" {
		t.Errorf("after all claims (-before the first +now):\n%s", diff)
	}
}

// another is a claim that gets the GPU when the scenario's does not have it.
func (s *scenario) another(name string) *resourceapi.ResourceClaim { return claim(name, s.other) }

func TestUnprepareLeavesTheMachineAsPrepareFoundIt(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			_, begin, prepared := s.undisturbed(t, preparing)
			_, _, end := s.undisturbed(t, unpreparing)
			if diff := begin.diff(end); diff != "" {
				t.Errorf("(-before prepare +after unprepare):\n%s", diff)
			}
			if cmp.Equal(begin, prepared, cmpopts.EquateEmpty()) {
				t.Error("prepare has changed nothing")
			}
		})
	}
}

// TestAFaultAtAnyStepIsRecovered fails every single step of prepare and unprepare, and ends everything before and
// after it: writes, syncs and renames of files, and what is done to GPUs. After a restart and a retry the machine is as
// after an undisturbed run; nothing is leaked, nothing held twice.
func TestAFaultAtAnyStepIsRecovered(t *testing.T) {
	t.Parallel()
	var faults, all atomic.Int64
	t.Cleanup(func() { t.Logf("tried: %d faults at %d steps in all", faults.Load(), all.Load()) })
	for name, s := range scenarios {
		for _, op := range []operation{preparing, unpreparing} {
			t.Run(name+"/"+string(op), func(t *testing.T) {
				t.Parallel()
				steps, before, after := s.undisturbed(t, op)
				place, tried := len(steps), 0 // so that scenarios begin at different ones
				for at := 1; at <= len(steps); at++ {
					for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter} {
						if mode == durabletest.CrashBefore && triedAfter(steps, at) {
							continue
						}
						if place++; raceDetector && place%4 != 0 { // make test-long tries all
							continue
						}
						t.Run(fmt.Sprintf("%v/%02d %s", mode, at, stepLabel(steps[at-1])), func(t *testing.T) {
							tried++
							n := newNodeOf(t, s.machine())
							s.start(t, n, op)
							n.disturb(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: mode, At: at})
							s.check(t, n, op, s.run(n, op), before, after, s.seeing)
						})
					}
				}
				t.Logf("tried: %s, %s: %d faults at %d steps", name, op, tried, len(steps))
				faults.Add(int64(tried))
				all.Add(int64(len(steps)))
			})
		}
	}
}

// triedAfter tells that to end everything before this step is to end it after the one before. A write happens by half then.
func triedAfter(steps []string, at int) bool {
	return at > 1 && !strings.HasPrefix(steps[at-2], "write ")
}

// TestAnAgentThatStartsBlindRecovers ends everything before the first step of prepare and unprepare and after each one, which is before the
// next one, and then starts an agent as package driver does.
func TestAnAgentThatStartsBlindRecovers(t *testing.T) {
	t.Parallel()
	for name, s := range scenarios {
		for _, op := range []operation{preparing, unpreparing} {
			t.Run(name+"/"+string(op), func(t *testing.T) {
				t.Parallel()
				steps, before, after := s.undisturbed(t, op)
				waited, tried := 0, 0
				blind := func(t *testing.T, n *node, op operation) (*prepare.Manager, prepare.Recovery) {
					m, recovery, owed := s.blind(t, n, op)
					waited += owed
					return m, recovery
				}
				for at := 0; at <= len(steps); at++ {
					if raceDetector && (at+len(steps))%3 != 0 { // make test-long tries all
						continue
					}
					tried++
					mode, label := durabletest.CrashAfter, "nothing"
					if at == 0 {
						mode = durabletest.CrashBefore
					} else {
						label = stepLabel(steps[at-1])
					}
					t.Run(fmt.Sprintf("%02d %s", at, label), func(t *testing.T) {
						n := newNodeOf(t, s.machine())
						s.start(t, n, op)
						n.hardware.Lead(n.ctx) // what is known of the GPUs outlives it
						n.disturb(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: mode, At: max(at, 1)})
						s.check(t, n, op, s.run(n, op), before, after, blind)
					})
				}
				t.Logf("tried: %s, %s: ended at %d places of %d steps, with NVML closed at the start: %d GPUs had to wait for it", name, op, tried, len(steps), waited)
				// To give a GPU back to its driver is to open NVML.
				if waited == 0 && s.profile != withSound && !raceDetector {
					t.Error("nothing had to wait for NVML, so it was not seen to be done then")
				}
			})
		}
	}
}

// TestKill9AtAnyStepIsRecovered kills a process that prepares, or unprepares, with SIGKILL before and after every
// single step, or before and after some, and then does as TestAFaultAtAnyStepIsRecovered.
func TestKill9AtAnyStepIsRecovered(t *testing.T) {
	if testing.Short() {
		t.Skip("starts hundreds of processes: run without -short")
	}
	t.Parallel()
	var killed atomic.Int64
	t.Cleanup(func() { t.Logf("tried: %d processes killed in all", killed.Load()) })
	for name, s := range scenarios {
		for _, op := range []operation{preparing, unpreparing} {
			t.Run(name+"/"+string(op), func(t *testing.T) {
				t.Parallel()
				steps, before, after := s.undisturbed(t, op)
				place, tried := len(steps), 0 // so that scenarios begin at different ones
				for at := 1; at <= len(steps); at++ {
					for _, mode := range []durabletest.Mode{durabletest.KillBefore, durabletest.KillAfter} {
						if mode == durabletest.KillBefore && triedAfter(steps, at) {
							continue
						}
						if place++; place%*everyNth != 0 {
							continue
						}
						tried++
						t.Run(fmt.Sprintf("%v/%02d %s", mode, at, stepLabel(steps[at-1])), func(t *testing.T) {
							root := t.TempDir()
							n := nodeIn(t, root, s.machine(), filepath.Join(root, "sim"))
							s.start(t, n, op)
							// This process is none of the node's: it would keep a GPU that is to leave the driver.
							if err := n.hardware.handle.Shutdown(); err != nil {
								t.Fatal(err)
							}
							kill9(t, root, name, op, mode, at)
							if err := n.hardware.handle.Init(); err != nil {
								t.Fatal(err)
							}
							s.check(t, n, op, errors.New("killed"), before, after, s.seeing)
						})
					}
				}
				killed.Add(int64(tried))
				t.Logf("tried: %s, %s: %d killed, of those before and after each of %d steps every %d.", name, op, tried, len(steps), *everyNth)
			})
		}
	}
}

const victimEnv = "STOWAGE_PREPARE_VICTIM"

// order tells the process that is killed what to do.
type order struct {
	Root     string
	Scenario string
	Op       operation
	Mode     durabletest.Mode
	At       int
}

// kill9 starts this test program as an agent, and returns when it was killed.
func kill9(t *testing.T, root, scenario string, op operation, mode durabletest.Mode, at int) {
	t.Helper()
	data, err := json.Marshal(order{root, scenario, op, mode, at})
	if err != nil {
		t.Fatal(err)
	}
	var output bytes.Buffer
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+string(data))
	cmd.Stdout, cmd.Stderr = &output, &output
	err = cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the agent was not killed: %v\n%s", err, &output)
	}
}

// victim is the agent's process. It returns only if it was not killed.
func victim(text string) int {
	var o order
	err := json.Unmarshal([]byte(text), &o)
	if err == nil {
		var n *node
		if n, err = victimNode(o.Root, scenarios[o.Scenario].machine()); err == nil {
			n.disturb(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: o.Mode, At: o.At})
			s := scenarios[o.Scenario]
			err = s.run(n, o.Op)
		}
	}
	fmt.Fprintln(os.Stderr, "not killed:", err)
	return 1
}

// machineState is what must be the same after every history: the ledger, the CDI folder, the quarantine, and the GPUs.
type machineState struct {
	Claims  []*ledger.Entry
	Files   map[string]string
	GPUs    []nvmlsim.GPUState
	Daemons []nvmlsim.Daemon
	Clients []nvmlsim.Client
}

// diff says how the other state differs. Most do not, which is found out cheaply.
func (s machineState) diff(other machineState) string {
	if reflect.DeepEqual(s, other) {
		return ""
	}
	return cmp.Diff(s, other, cmpopts.EquateEmpty())
}

func (n *node) state() machineState {
	n.t.Helper()
	now := n.hardware.machine.State()
	s := machineState{Files: map[string]string{}, Daemons: slices.Clone(now.Daemons), Clients: now.Clients}
	for _, gpu := range now.GPUs {
		gpu.Instances = slices.Clone(gpu.Instances)
		for i := range gpu.Instances {
			gpu.Instances[i].Number = 0 // counts all that there ever were
			gpu.Instances[i].Compute = slices.Clone(gpu.Instances[i].Compute)
			for c := range gpu.Instances[i].Compute {
				gpu.Instances[i].Compute[c].Number = 0
			}
		}
		s.GPUs = append(s.GPUs, gpu)
	}
	neutral := strings.NewReplacer(n.root, "ROOT", now.BootID, "BOOT")
	claims, err := ledger.Open(durabletest.Unsynced{}, n.claimsDir())
	if err != nil {
		n.t.Fatal(err)
	}
	records, err := claims.Records()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, record := range records {
		if record.Err != nil || record.Recovered != nil {
			n.t.Errorf("record of claim %s: %v, %v", record.UID, record.Err, record.Recovered)
			continue
		}
		data, err := json.Marshal(record.Entry)
		if err != nil {
			n.t.Fatal(err)
		}
		entry := &ledger.Entry{}
		if err := json.Unmarshal([]byte(neutral.Replace(string(data))), entry); err != nil {
			n.t.Fatal(err)
		}
		s.Claims = append(s.Claims, entry)
	}
	dirs := []string{n.cdiDir(), filepath.Join(n.root, "state", "quarantine"), n.claimsDir()}
	metadata, err := os.ReadDir(n.metadataDir())
	if err != nil && !os.IsNotExist(err) {
		n.t.Fatal(err)
	}
	for _, claim := range metadata {
		dirs = append(dirs, filepath.Join(n.metadataDir(), claim.Name()))
		s.Files[neutral.Replace(dirs[len(dirs)-1])] = "" // also if it is empty
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			n.t.Fatal(err)
		}
		for _, file := range entries {
			path := filepath.Join(dir, file.Name())
			data, err := os.ReadFile(path)
			if err != nil {
				n.t.Fatal(err)
			}
			if dir == n.claimsDir() {
				data = nil // compared above
			}
			s.Files[neutral.Replace(path)] = neutral.Replace(string(data))
		}
	}
	return s
}

// stepLabel makes a step's name fit for a test's.
func stepLabel(step string) string {
	op, target, _ := strings.Cut(step, " ")
	return op + " " + filepath.Base(target)
}

// faultyDevice counts what is done to a GPU as steps.
type faultyDevice struct {
	nvml.Device
	faulty *durabletest.Faulty
}

func (d faultyDevice) SetMIGMode(on bool) error {
	return d.faulty.Do("MIG-mode", fmt.Sprint(on), func() error { return d.Device.SetMIGMode(on) })
}

func (d faultyDevice) CreateGPUInstance(profile nvml.MIGProfile, at nvml.Placement) (id uint32, err error) {
	err = d.faulty.Do("create-instance", profile.Name, func() (err error) {
		id, err = d.Device.CreateGPUInstance(profile, at)
		return err
	})
	return id, err
}

func (d faultyDevice) CreateComputeInstance(instance uint32) (made nvml.MIGDevice, err error) {
	err = d.faulty.Do("create-compute", fmt.Sprint(instance), func() (err error) {
		made, err = d.Device.CreateComputeInstance(instance)
		return err
	})
	return made, err
}

func (d faultyDevice) DestroyComputeInstance(instance, compute uint32) error {
	return d.faulty.Do("destroy-compute", fmt.Sprint(instance), func() error { return d.Device.DestroyComputeInstance(instance, compute) })
}

func (d faultyDevice) DestroyGPUInstance(instance uint32) error {
	return d.faulty.Do("destroy-instance", fmt.Sprint(instance), func() error { return d.Device.DestroyGPUInstance(instance) })
}

func (d faultyDevice) SetComputeMode(mode nvml.ComputeMode) error {
	return d.faulty.Do("compute-mode", string(mode), func() error { return d.Device.SetComputeMode(mode) })
}

func (d faultyDevice) SetPersistence(on bool) error {
	return d.faulty.Do("persistence", fmt.Sprint(on), func() error { return d.Device.SetPersistence(on) })
}

// faultyKernel counts what is written to the kernel as steps.
type faultyKernel struct {
	vfio.Sysfs
	faulty *durabletest.Faulty
}

func (k faultyKernel) Write(name, value string) error {
	return k.faulty.Do("kernel", filepath.Base(name), func() error { return k.Sysfs.Write(name, value) })
}

type faultySlicer struct {
	sharing.TimeSlicer
	faulty *durabletest.Faulty
}

func (s faultySlicer) SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error {
	return s.faulty.Do("time-slice", string(interval), func() error { return s.TimeSlicer.SetTimeSlice(ctx, gpu, interval) })
}

type faultyPersistenced struct {
	sharing.PersistenceDaemon
	faulty *durabletest.Faulty
}

func (p faultyPersistenced) Keep(ctx context.Context, address string, on bool) error {
	return p.faulty.Do("persistenced", fmt.Sprint(on), func() error { return p.PersistenceDaemon.Keep(ctx, address, on) })
}

type faultyDaemons struct {
	sharing.Daemons
	faulty *durabletest.Faulty
}

func (d faultyDaemons) Start(ctx context.Context, daemon sharing.Daemon) error {
	return d.faulty.Do("start-daemon", daemon.Name, func() error { return d.Daemons.Start(ctx, daemon) })
}

func (d faultyDaemons) Stop(ctx context.Context, name string) error {
	return d.faulty.Do("stop-daemon", name, func() error { return d.Daemons.Stop(ctx, name) })
}

// TestARetryUndoesFirst: the kubelet calls again although the agent was not started anew, for example because the disk
// was full for a moment.
func TestARetryUndoesFirst(t *testing.T) {
	for _, name := range []string{"time-slicing", "MIG", "passthrough"} {
		s := scenarios[name]
		steps, before, after := s.undisturbed(t, preparing)
		for at := 1; at <= len(steps); at++ {
			t.Run(fmt.Sprintf("%s/%02d %s", name, at, stepLabel(steps[at-1])), func(t *testing.T) {
				n := newNodeOf(t, s.machine())
				s.start(t, n, preparing)
				n.disturb(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: durabletest.CrashAfter, At: at})
				_ = s.run(n, preparing)
				n.restart()
				m := n.manager()
				if _, err := m.Prepare(n.ctx, s.claim()); err != nil {
					t.Fatal(err)
				}
				if diff := after.diff(n.state()); diff != "" {
					t.Errorf("after the retry (-undisturbed +now):\n%s", diff)
				}
				if err := m.Unprepare(n.ctx, s.claim().UID); err != nil {
					t.Fatal(err)
				}
				if diff := before.diff(n.state()); diff != "" {
					t.Errorf("after unprepare (-before the claim +now):\n%s", diff)
				}
			})
		}
	}
}

// TestACrashAfterARebootLeavesNothing: a claim comes back after a reboot, the agent dies at any step of making it anew,
// and then the pod is gone.
func TestACrashAfterARebootLeavesNothing(t *testing.T) {
	s := scenarios["MIG"]
	again := func(faulty *durabletest.Faulty) *node {
		n := newNodeOf(t, twoGPUs)
		s.start(t, n, unpreparing) // prepared
		n.do(&nvmlsim.Reboot{})
		n.hardware.discover(t, n.hardware.policy)
		n.disturb(faulty)
		_ = s.run(n, preparing)
		n.restart()
		return n
	}
	count := &durabletest.Faulty{FS: durabletest.Unsynced{}}
	again(count)
	if len(count.Steps()) < 10 {
		t.Fatalf("only %d steps", len(count.Steps()))
	}
	for at := range count.Steps() {
		n := again(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: durabletest.CrashAfter, At: at + 1})
		m := n.manager()
		if _, err := m.Recover(n.ctx); err != nil {
			t.Fatal(err)
		}
		if err := m.Unprepare(n.ctx, s.claim().UID); err != nil {
			t.Fatal(err)
		}
		for i := range 2 {
			if g := n.gpu(i); g.MIG || len(g.Instances) > 0 {
				t.Errorf("step %d, %s: left on GPU %d: MIG %v, instances %v", at+1, count.Steps()[at], i, g.MIG, g.Instances)
			}
		}
	}
}
