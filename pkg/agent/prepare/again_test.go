// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAClaimThatIsAsItWasIsNotWrittenAgain: the kubelet asks for each pod, and whoever looks at the pods does so every minute.
func TestAClaimThatIsAsItWasIsNotWrittenAgain(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	claims := []*resourceapi.ResourceClaim{
		reservedFor(claim("train", "gpu="+gpu0), "first"),
		reservedFor(withConfig(claim("infer", "gpu="+gpu1), driverName, underMPS), "first", "second"),
	}
	for _, c := range claims {
		n.prepared(n.manager(), c)
	}
	disk := &durabletest.Faulty{FS: n.disk}
	n.fsys = disk
	m := n.manager()
	for _, c := range claims {
		n.prepared(m, c)
		if err := m.NotePods(n.ctx, c); err != nil {
			t.Error(err)
		}
	}
	if err := reconciled(n, m); err != nil {
		t.Error(err)
	}
	for _, step := range disk.Steps() {
		if !strings.HasPrefix(step, "mkdir ") {
			t.Errorf("%s, and nothing has changed", step)
		}
	}
}

// TestOnlyWhoAsksForMPSGetsItsDaemon: the other containers of the claim, and administrators, know of none.
func TestOnlyWhoAsksForMPSGetsItsDaemon(t *testing.T) {
	for _, asks := range [][]string{{"mps"}, nil} { // nil is all of them, and an administrator's device is used as it is
		n := newNode(t)
		c := withConfig(claim("train", "mps="+gpu0, "plain="+gpu1, result("watch="+gpu2+"+admin")), driverName, underMPS)
		c.Status.Allocation.Devices.Config[0].Requests = asks
		devices := n.prepared(n.manager(), c)
		for request, want := range map[string]bool{"mps": true, "plain": asks == nil, "watch": false} {
			env := n.env(slices.DeleteFunc(slices.Clone(devices), func(d ledger.Device) bool { return d.Request != request }))
			if got := strings.Contains(strings.Join(env, " "), "CUDA_MPS_PIPE_DIRECTORY="); got != want {
				t.Errorf("parameters of %v, environment of %s: %v, want the daemon in it: %v", asks, request, env, want)
			}
		}
	}
}

// TestAWaitEndsAsSoonAsTheHolderHasGone, and who uses it is asked every 5 s alone.
func TestAWaitEndsAsSoonAsTheHolderHasGone(t *testing.T) {
	t.Parallel()
	for _, after := range []time.Duration{time.Second, 12 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			plain := n.manager()
			n.prepared(plain, claim("first", "gpu="+gpu0))
			asked, begun := 0, time.Now()
			n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { asked++; return ending }
			n.options.Waiting = func(*resourceapi.ResourceClaim, error) {
				time.AfterFunc(after, func() { n.unprepare(plain, "first-uid") })
			}
			n.prepared(n.manager(), claim("second", "gpu="+gpu0))
			if took := time.Since(begun); took > after+200*time.Millisecond || asked != 1+int(after/(5*time.Second)) {
				t.Errorf("it took %s, and was asked %d times who uses it; the holder was gone after %s", took, asked, after)
			}
		})
	}
}

// givenUp ends a call when it is asked whether the claim's daemon can be started, which is the last question before something is done.
type givenUp struct {
	sharing.Daemons
	end func()
}

func (d givenUp) Check(ctx context.Context, daemon sharing.Daemon) error {
	d.end()
	return d.Daemons.Check(ctx, daemon)
}

// TestNothingIsBegunForACallThatIsGivenUp: not even its record is written.
func TestNothingIsBegunForACallThatIsGivenUp(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		ctx, cancel := context.WithCancel(n.ctx)
		n.tools.Daemons = givenUp{sharing.NewSimulated(n.hardware.machine).Daemons, cancel}
		n.fsys = durabletest.Watched{FS: n.disk, Before: func(op, path string) error {
			if ctx.Err() != nil && strings.Contains(path, name) {
				t.Errorf("%s %s after the call was given up", op, path)
			}
			return nil
		}}
		_, err := n.manager().Prepare(ctx, withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
		if want := "prepare claim default/" + name; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// hiddenUsers are processes that cannot be seen.
type hiddenUsers struct{}

func (hiddenUsers) Of(context.Context, ...string) ([]uint32, error) { return nil, nil }
func (hiddenUsers) OfGPU(context.Context, int) ([]uint32, error)    { return nil, nil }

// TestAGPUThatNVMLSaysIsInUseIsNotPassedThrough, though no process is seen that has it open: it may be in another PID namespace.
func TestAGPUThatNVMLSaysIsInUseIsNotPassedThrough(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.options.Users = hiddenUsers{}
	n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 4711, Kind: nvmlsim.ProcessCompute}})
	before := n.state()
	_, err := n.manager().Prepare(n.ctx, claim("machine", "vm="+vm0))
	if err == nil || !strings.Contains(err.Error(), gpu0) || !strings.Contains(err.Error(), "4711") {
		t.Errorf("error %v, want that %s is in use by process 4711", err, gpu0)
	}
	if diff := before.diff(n.state()); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

// TestAShareOfAGPUThatCannotBeUsedIsRefused, as all of it would be.
func TestAShareOfAGPUThatCannotBeUsedIsRefused(t *testing.T) {
	for want, command := range map[string]nvmlsim.Command{
		"MIG mode is enabled": &nvmlsim.SetMIG{GPU: "0", Enabled: true},
		"keeps everybody off": &nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeProhibited},
	} {
		n := newNodeOf(t, twoGPUs)
		n.do(command)
		if _, err := n.manager().Prepare(n.ctx, sharedBy("train", "20Gi:25", "")); err == nil || !strings.Contains(err.Error(), want) || len(n.files()) > 0 {
			t.Errorf("error %v, want %q, files %v", err, want, n.files())
		}
	}
}

// TestAShareIsNotCountedTwice: it is more than half of the GPU, and the kubelet asks again.
func TestAShareIsNotCountedTwice(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for range 2 {
		n.prepared(n.manager(), sharedBy("train", "50Gi:10", ""))
		n.prepared(n.manager(), sharedBy("infer", "10Gi:60", ""))
	}
}

// TestAReleaseTellsOfItsOwnQuarantineAlone: another claim has left a GPU in it.
func TestAReleaseTellsOfItsOwnQuarantineAlone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	bothPrepared(n, m)
	n.hardware.broken[gpu1] = nvml.ErrGPULost
	n.unprepare(m, "infer-uid")
	if done := n.releaseOf(m, "train-uid", false); len(done.Quarantined) > 0 || len(done.Left) > 0 {
		t.Errorf("%+v, and %s is another claim's", done, gpu1)
	}
}

// TestReconcileWaitsOnceForAClaimThatIsAtWork, and for each by itself: its metadata are looked at by who prepares it.
func TestReconcileWaitsOnceForAClaimThatIsAtWork(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	bothPrepared(n, n.manager())
	n.timeout = 30 * time.Millisecond
	m := n.manager()
	for _, uid := range bothClaims {
		unlock, err := prepare.LockClaim(m, uid)
		if err != nil {
			t.Fatal(err)
		}
		defer unlock()
	}
	err := reconciled(n, m)
	for _, uid := range bothClaims {
		if err == nil || strings.Count(err.Error(), "claim "+string(uid)) != 1 {
			t.Errorf("error %v, want claim %s once in it", err, uid)
		}
	}
}

// TestMetadataThatCannotBeWrittenIsNoSuccess: the container would be mounted a file that is not there.
func TestMetadataThatCannotBeWrittenIsNoSuccess(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.fsys = durabletest.Watched{FS: n.disk, Before: failing("create", "/"+name+"-uid/gpu.json.tmp", 1)}
		_, err := n.manager().Prepare(n.ctx, claim(name, result("gpu="+gpu)))
		if want := "claim " + name + "-uid, request gpu"; !errors.Is(err, errDisk) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want that the disk fails for %s", err, want)
		}
		n.fsys = n.disk
	}
	if left := n.files(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestAReadingThatFailsForADaemonOfAPartitionIsNoSuccess: it is started with the partition's UUID.
func TestAReadingThatFailsForADaemonOfAPartitionIsNoSuccess(t *testing.T) {
	served := withConfig(claim("train", "mig="+gpu0+"-mig-1g10gb-0"), driverName, sharingConfig("MigDeviceConfig", "MPS", ""))
	for at, all := 1, 2; at < all; at++ {
		n := newNodeOf(t, twoGPUs)
		before := n.state()
		r := &readings{fails: at}
		n.readThrough(r)
		_, err := n.manager().Prepare(n.ctx, served)
		if all = max(all, len(r.names)+1); at <= len(r.names) && !errors.Is(err, errReading) && !lookedAtAgain(preparing, at-1, r.names[at-1]) {
			t.Errorf("%d: %s could not be read: %v", at, r.names[at-1], err)
		}
		n.restart()
		if err == nil {
			n.unprepare(n.manager(), served.UID)
		}
		if err := reconciled(n, n.manager()); err != nil {
			t.Error(err)
		}
		if diff := before.diff(n.state()); diff != "" {
			t.Errorf("reading %d of %v failed (-before +after):\n%s", at, r.names, diff)
		}
	}
}

// TestALockThatCannotBeTakenIsNotWaitedFor: the error is the file system's, and no time is blamed.
func TestALockThatCannotBeTakenIsNotWaitedFor(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	dir := prepare.LocksDir(n.stateDir())
	for _, lock := range []string{"claims.lock", "gpu-" + gpu0 + ".lock"} {
		if err := os.MkdirAll(filepath.Join(dir, lock), 0o700); err != nil { // a folder in the file's place
			t.Fatal(err)
		}
		if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); !errors.Is(err, syscall.EISDIR) || strings.Contains(err.Error(), "began to wait") {
			t.Errorf("%s: error %v", lock, err)
		}
		if err := os.Remove(filepath.Join(dir, lock)); err != nil {
			t.Fatal(err)
		}
	}
	n.prepared(m, claim("train", "gpu="+gpu0))
}

// TestMetadataThatCannotBeRemovedIsNoSuccess: the claim stays until they are.
func TestMetadataThatCannotBeRemovedIsNoSuccess(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	bothPrepared(n, n.manager())
	for _, uid := range bothClaims {
		n.fsys = durabletest.Watched{FS: n.disk, Before: failing("remove", string(uid)+"/gpu.json", 1)}
		if err := n.manager().Unprepare(n.ctx, uid); !errors.Is(err, errDisk) {
			t.Errorf("claim %s: error %v", uid, err)
		}
		n.fsys = n.disk
		n.unprepare(n.manager(), uid)
	}
	if left := n.files(); len(left) > 0 || !n.empty(n.metadataDir()) {
		t.Errorf("left: %v", left)
	}
}

// TestPersistenceIsMissedByTheSettingsOfItsGPUAlone: the claim's other GPU has one.
func TestPersistenceIsMissedByTheSettingsOfItsGPUAlone(t *testing.T) {
	for minor, want := range map[int]bool{0: false, 1: true} {
		n := newNodeOf(t, twoGPUs)
		n.hardware.wrap = func(d nvml.Device) nvml.Device {
			if is, err := d.MinorNumber(); err != nil || is != minor {
				return d
			}
			return forbidden{d, nvml.ErrNoPermission}
		}
		c := withConfig(claim("train", "set="+gpu0, "plain="+gpu1), driverName, sharingConfig("GpuConfig", "Exclusive", ""))
		c.Status.Allocation.Devices.Config[0].Requests = []string{"set"}
		if _, err := n.manager().Prepare(n.ctx, c); (err == nil) != want {
			t.Errorf("persistence is forbidden on GPU %d: %v, want it prepared: %v", minor, err, want)
		}
	}
}
