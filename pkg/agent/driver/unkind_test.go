// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestALostGPUIsNobodyElses: NVML finds no GPU by its UUID any more when one has fallen off the bus. The others are healthy, are given to
// claims and are acted upon.
func TestALostGPUIsNobodyElses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		_, ctx := ktesting.NewTestContext(t)
		h := r.found(ctx)
		gpus := h.inventory.node.GPUs
		stop := background(ctx, h.Watch)
		time.Sleep(time.Minute)
		r.do(&nvmlsim.LoseGPU{GPU: "0"})
		time.Sleep(5 * time.Minute)
		got := published(t, h)
		if got[0] != first+" gpu-lost=:NoExecute" {
			t.Errorf("the lost GPU is %q", got[0])
		}
		for i, gpu := range gpus[1:] {
			if got[i+1] != gpu.Name {
				t.Errorf("beside it is %q, want %s without a taint", got[i+1], gpu.Name)
			}
			if _, err := h.Find(ctx, gpu.Name); err != nil {
				t.Errorf("%s for prepare: %v", gpu.Name, err)
			}
			if err := h.On(ctx, gpu.Name, gpu.UUID, func(d nvml.Device) error { _, err := d.Processes(); return err }); err != nil {
				t.Errorf("an act on %s: %v", gpu.Name, err)
			}
		}
		stop()
	})
}

// TestWhatIsNotProvedLostMovesNobody: the driver says that a GPU is lost, or that there is none, and the bus does not.
func TestWhatIsNotProvedLostMovesNobody(t *testing.T) {
	for name, answer := range map[string]gonvml.Return{"lost": gonvml.ERROR_GPU_IS_LOST, "not found": gonvml.ERROR_NOT_FOUND} {
		for often, times := range map[string]int32{"once": 1, "all the time": 1000} {
			t.Run(name+" "+often, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t, "t4")
					var left atomic.Int32
					r.wrap = func(lib nvml.Library) nvml.Library { return &liar{Library: lib, answer: answer, left: &left} }
					_, ctx := ktesting.NewTestContext(t)
					h := r.found(ctx)
					stop := background(ctx, h.Watch)
					time.Sleep(time.Minute)
					synctest.Wait()
					left.Store(times)
					for range 30 {
						time.Sleep(10 * time.Second)
						for _, device := range published(t, h) {
							if strings.Contains(device, "gpu-lost") || times == 1 && strings.Contains(device, "=") {
								t.Errorf("published %q after %d answers of %v, while the GPU is on the bus", device, times-left.Load(), answer)
							}
						}
					}
					if got := published(t, h)[0]; times > 1 && !strings.Contains(got, "no-answer=:NoSchedule") {
						t.Errorf("published %q, want that no new claim gets it", got)
					}
					stop()
				})
			})
		}
	}
}

// liar is a library that denies the first GPU a number of times.
type liar struct {
	nvml.Library
	answer gonvml.Return
	left   *atomic.Int32
}

func (l *liar) DeviceAt(busID string) (nvml.Device, error) {
	// Polls, looks and watches ask side by side.
	if strings.HasSuffix(busID, "1b.0") && l.left.Add(-1) >= 0 {
		return nil, &nvml.CallError{Call: "nvmlDeviceGetHandleByPciBusId_v2", Return: l.answer}
	}
	return l.Library.DeviceAt(busID)
}

// TestWhoUsesALostGPUIsNotKnown: a process keeps it open, whatever NVML says.
func TestWhoUsesALostGPUIsNotKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "t4")
		_, ctx := ktesting.NewTestContext(t)
		h := r.found(ctx)
		gpu := h.inventory.node.GPUs[0].Name
		r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 42, Kind: nvmlsim.ProcessCompute}})
		if n, err := h.Processes(ctx, gpu); err != nil || n != 1 {
			t.Fatalf("%d processes, %v", n, err)
		}
		r.do(&nvmlsim.LoseGPU{GPU: "0"})
		if n, err := h.Processes(ctx, gpu); err == nil {
			t.Errorf("%d processes are on a lost GPU, want an error", n)
		}
	})
}

// TestASlowGPUIsNotHung: it takes more than the deadline for an answer, again and again.
func TestASlowGPUIsNotHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "t4")
		_, ctx := ktesting.NewTestContext(t)
		h := r.found(ctx)
		want := published(t, h)
		stop := background(ctx, h.Watch)
		time.Sleep(time.Minute)
		r.do(&nvmlsim.SlowGPU{GPU: "0", Milliseconds: 800})
		began := time.Now()
		ctxLong, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := h.On(ctxLong, h.inventory.node.GPUs[0].Name, h.inventory.node.GPUs[0].UUID, func(d nvml.Device) error { _, err := d.Readings(); return err }); err != nil || time.Since(began) < health.Deadline {
			t.Fatalf("%v after %s: want an answer after more than %s", err, time.Since(began), health.Deadline)
		}
		for range 60 {
			time.Sleep(10 * time.Second)
			if got := published(t, h); !slices.Equal(got, want) {
				t.Errorf("published %q, want %q", got, want)
			}
		}
		r.do(&nvmlsim.SlowGPU{GPU: "0"})
		stop()
	})
}

// TestGPUsThatAreAllWithVirtualMachines: NVML does not start without a GPU unless it is told to.
func TestGPUsThatAreAllWithVirtualMachines(t *testing.T) {
	r := newRig(t, "t4")
	lib := r.machine.NVML()
	for i := range r.machine.Profile().GPUs {
		r.do(&nvmlsim.RemoveGPU{GPU: string(rune('0' + i))})
	}
	if ret := lib.Init(); ret == gonvml.SUCCESS {
		t.Fatal("NVML starts without a GPU and without its flag")
	}
	_, ctx := ktesting.NewTestContext(t)
	node, err := r.hardware().Discover(ctx)
	if err != nil || len(node.GPUs) != 0 {
		t.Errorf("a look at a node without GPUs of the driver: %v, %v", node, err)
	}
}

// TestWhoHasALostGPUOpenUsesIt: NVML does not tell, and the kernel does. This very process, which has every GPU open, is no user.
func TestWhoHasALostGPUOpenUsesIt(t *testing.T) {
	r := newRig(t, "dgx-h100")
	_, ctx := ktesting.NewTestContext(t)
	h := r.found(ctx)
	h.users.open = vfio.Simulated{Machine: r.machine}
	for _, gpu := range []string{"0", "1"} {
		r.do(&nvmlsim.AddProcess{GPU: gpu, Process: nvmlsim.Process{PID: 42, Kind: nvmlsim.ProcessCompute}})
		r.do(&nvmlsim.AddProcess{GPU: gpu, Process: nvmlsim.Process{PID: 43, Kind: nvmlsim.ProcessCompute}})
	}
	r.do(&nvmlsim.LoseGPU{GPU: "0"})
	for want := 2; want >= 0; want-- {
		if n, err := h.Processes(ctx, first); err != nil || n != want {
			t.Errorf("%d processes, %v, want %d", n, err, want)
		}
		if want > 0 {
			r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: uint32(41 + want)})
		}
	}
}

// TestARecoveryActionThatTheRulesPassOverIsNotRead by who prepares claims, either.
func TestARecoveryActionThatTheRulesPassOverIsNotRead(t *testing.T) {
	for rules, want := range map[string]bool{
		"": true, "recovery-action=avoid": true, "recovery-action=off": false, "recovery-action=notice": false,
		"Tesla T4:recovery-action=off": true, "NVIDIA H100 80GB HBM3:recovery-action=off": false,
	} {
		t.Run(rules, func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			_, ctx := ktesting.NewTestContext(t)
			h := r.found(ctx)
			var err error
			if h.opts.Rules, err = health.ParsePolicy(rules); err != nil {
				t.Fatal(err)
			}
			r.do(&nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset})
			var readings nvml.Readings
			err = h.On(ctx, first, h.inventory.node.GPUs[0].UUID, func(d nvml.Device) (err error) { readings, err = d.Readings(); return err })
			if err != nil || (readings.RecoveryAction != nil) != want {
				t.Errorf("recovery action %v, %v, want one: %v", readings.RecoveryAction, err, want)
			}
		})
	}
}
