// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const sound = "0000:1b:00.1"

// card is a machine whose first GPU, at address gpu, has sound.
func card(t *testing.T) (*nvmlsim.Machine, *recorder) {
	t.Helper()
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	profile.GPU.Functions = []nvmlsim.Function{{Class: "0x040300", Device: "0x22ba", Driver: "snd_hda_intel"}}
	machine := nvmlsim.NewMachine(profile, "node-1")
	return machine, &recorder{Sysfs: machine.NVML().Sysfs(), fail: map[string]error{}}
}

// recorder notes what is written, and lets writes to some files fail, by the files' last names.
type recorder struct {
	vfio.Sysfs
	fail map[string]error
	// unbinding is told of each unbind.
	unbinding func()

	mu    sync.Mutex
	noted []string
}

func (r *recorder) Write(name, value string) error {
	r.mu.Lock()
	r.noted = append(r.noted, filepath.Base(name)+"="+strings.TrimSpace(value))
	r.mu.Unlock()
	if r.unbinding != nil && filepath.Base(name) == "unbind" {
		r.unbinding()
	}
	if err := r.fail[filepath.Base(name)]; err != nil {
		return err
	}
	return r.Sysfs.Write(name, value)
}

// writes returns what was written since the last time.
func (r *recorder) writes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	noted := r.noted
	r.noted = nil
	return noted
}

// is tells how a function is: its driver and override.
func is(t *testing.T, sysfs vfio.Sysfs, address string) string {
	t.Helper()
	f, err := vfio.ReadFunction(sysfs, address)
	if err != nil {
		t.Fatal(err)
	}
	override, err := vfio.NewBinder(sysfs).Override(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	return f.Driver + "/" + override
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func TestAFunctionIsTakenAndGivenBack(t *testing.T) {
	for _, address := range []string{gpu, sound} {
		_, sysfs := card(t)
		b := vfio.NewBinder(sysfs)
		before := is(t, sysfs, address)
		driver, _, _ := strings.Cut(before, "/")
		for range 2 { // the second time there is nothing left to do
			if err := b.Take(t.Context(), address); err != nil {
				t.Fatal(err)
			}
			if now := is(t, sysfs, address); now != "vfio-pci/vfio-pci" {
				t.Errorf("taken, %s is with %s", address, now)
			}
		}
		if want := []string{"driver_override=vfio-pci", "unbind=" + address, "bind=" + address}; fmt.Sprint(want) != fmt.Sprint(sysfs.writes()) {
			t.Errorf("written is not %v", want)
		}
		for range 2 {
			if err := b.GiveBack(t.Context(), address, driver, ""); err != nil {
				t.Fatal(err)
			}
			if now := is(t, sysfs, address); now != before {
				t.Errorf("given back, %s is with %s, before it was with %s", address, now, before)
			}
		}
		if written := sysfs.writes(); len(written) != 3 {
			t.Errorf("written %v", written)
		}
	}
}

// TestEachHalfWayIsFinished: whatever is left of an attempt that ended, taking and giving back go on from there.
func TestEachHalfWayIsFinished(t *testing.T) {
	for _, failing := range []string{"driver_override", "unbind", "bind"} {
		_, sysfs := card(t)
		b := vfio.NewBinder(sysfs)
		sysfs.fail[failing] = unix.EIO
		if err := b.Take(t.Context(), gpu); !errors.Is(err, unix.EIO) {
			t.Errorf("take, %s fails: %v", failing, err)
		}
		delete(sysfs.fail, failing)
		if err := b.GiveBack(t.Context(), gpu, "nvidia", ""); err != nil || is(t, sysfs, gpu) != "nvidia/" {
			t.Errorf("given back after %s failed: %s, %v", failing, is(t, sysfs, gpu), err)
		}
		if err := b.Take(t.Context(), gpu); err != nil {
			t.Fatal(err)
		}
		sysfs.fail[failing] = unix.EIO
		if err := b.GiveBack(t.Context(), gpu, "nvidia", ""); !errors.Is(err, unix.EIO) {
			t.Errorf("give back, %s fails: %v", failing, err)
		}
		delete(sysfs.fail, failing)
		if err := b.GiveBack(t.Context(), gpu, "nvidia", ""); err != nil || is(t, sysfs, gpu) != "nvidia/" {
			t.Errorf("given back again after %s failed: %s, %v", failing, is(t, sysfs, gpu), err)
		}
	}
}

func TestAFunctionGetsBackWhatItHad(t *testing.T) {
	tests := map[string]struct{ driver, override, want string }{
		"a driver":                 {driver: "nvidia", want: "nvidia/"},
		"a driver, by an override": {driver: "nvidia", override: "nvidia", want: "nvidia/nvidia"},
		"no driver":                {want: "/"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, sysfs := card(t)
			b := vfio.NewBinder(sysfs)
			write(t, sysfs, "bus/pci/devices/"+gpu+"/driver_override", test.override)
			if test.driver == "" {
				write(t, sysfs, "bus/pci/drivers/nvidia/unbind", gpu)
			}
			if err := errors.Join(b.Take(t.Context(), gpu), b.GiveBack(t.Context(), gpu, test.driver, test.override)); err != nil {
				t.Fatal(err)
			}
			if now := is(t, sysfs, gpu); now != test.want {
				t.Errorf("it is with %s, want %s", now, test.want)
			}
		})
	}
}

// TestWhatAnAdministratorHasDoneSinceStays: the function is neither with vfio-pci nor with the driver that it had.
func TestWhatAnAdministratorHasDoneSinceStays(t *testing.T) {
	_, sysfs := card(t)
	b := vfio.NewBinder(sysfs)
	if err := b.Take(t.Context(), sound); err != nil {
		t.Fatal(err)
	}
	write(t, sysfs, "bus/pci/drivers/vfio-pci/unbind", sound)
	write(t, sysfs, "bus/pci/devices/"+sound+"/driver_override", "snd_hda_intel")
	write(t, sysfs, "bus/pci/drivers/snd_hda_intel/bind", sound)
	sysfs.writes()
	if err := b.GiveBack(t.Context(), sound, "another", ""); err != nil {
		t.Error(err)
	}
	if written := sysfs.writes(); len(written) > 0 {
		t.Errorf("written %v", written)
	}
}

func TestWhyAFunctionIsNotBoundIsSaid(t *testing.T) {
	machine, sysfs := card(t)
	b := vfio.NewBinder(sysfs)
	if err := b.Take(t.Context(), "0000:ff:00.0"); err == nil || !strings.Contains(err.Error(), "0000:ff:00.0") {
		t.Errorf("no such function: %v", err)
	}
	if err := b.Take(t.Context(), gpu); err != nil {
		t.Fatal(err)
	}
	do(t, machine, &nvmlsim.UnloadDriver{})
	if err := b.GiveBack(t.Context(), gpu, "nvidia", ""); err == nil || !strings.Contains(err.Error(), "the driver nvidia: it is not loaded") {
		t.Errorf("the driver is not loaded: %v", err)
	}
	do(t, machine, &nvmlsim.LoadDriver{})
	if err := b.GiveBack(t.Context(), gpu, "nvidia", ""); err != nil || is(t, sysfs, gpu) != "nvidia/" {
		t.Errorf("the driver is loaded again: %v", err)
	}
	// The kernel says that it is done, and it is not.
	sysfs.Sysfs = deaf{sysfs.Sysfs}
	if err := b.Take(soon(t), gpu); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), `with the driver "nvidia", still`) {
		t.Errorf("nothing happens: %v", err)
	}
}

// deaf is a kernel that does nothing.
type deaf struct{ vfio.Sysfs }

func (deaf) Write(string, string) error { return nil }

// TestAWriteThatHangsHoldsUpItsFunctionAlone: a driver lets go only of what nobody uses.
func TestAWriteThatHangsHoldsUpItsFunctionAlone(t *testing.T) {
	for name, user := range map[string]nvmlsim.Command{
		"a process has the GPU open":           &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 7, Kind: nvmlsim.ProcessCompute}},
		"a virtual machine has the group open": &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 7, Kind: nvmlsim.ProcessVM}},
	} {
		t.Run(name, func(t *testing.T) {
			machine, sysfs := card(t)
			b := vfio.NewBinder(sysfs)
			move, then := func(ctx context.Context) error { return b.Take(ctx, gpu) }, "vfio-pci/vfio-pci"
			if strings.Contains(name, "virtual") {
				if err := b.Take(t.Context(), gpu); err != nil {
					t.Fatal(err)
				}
				move, then = func(ctx context.Context) error { return b.GiveBack(ctx, gpu, "nvidia", "") }, "nvidia/"
			}
			do(t, machine, user)
			ctx, cancel := context.WithCancel(t.Context())
			sysfs.unbinding = cancel
			if err := move(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "unbind, because somebody uses") {
				t.Errorf("in use: %v", err)
			}
			sysfs.writes()
			if err := move(soon(t)); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "an earlier read or write") {
				t.Errorf("still in use: %v", err)
			}
			if written := sysfs.writes(); len(written) > 0 {
				t.Errorf("%v were written while a write hung", written)
			}
			if err := b.Take(t.Context(), sound); err != nil {
				t.Errorf("another function: %v", err)
			}
			do(t, machine, &nvmlsim.RemoveProcess{GPU: "0", PID: 7})
			if err := move(t.Context()); err != nil || is(t, sysfs, gpu) != then {
				t.Errorf("not in use any more: %s, %v", is(t, sysfs, gpu), err)
			}
		})
	}
}

// removing is a kernel in which a function is being removed, which does not come to an end: it has the function's lock.
type removing struct {
	vfio.Sysfs
	address string
	ended   <-chan struct{}
}

func (r removing) ReadFile(name string) ([]byte, error) {
	if name == "bus/pci/devices/"+r.address+"/driver_override" {
		<-r.ended
	}
	return fs.ReadFile(r.Sysfs, name)
}

// TestAReadThatHangsHoldsUpItsFunctionAlone: somebody removes the function, and does not come to an end.
func TestAReadThatHangsHoldsUpItsFunctionAlone(t *testing.T) {
	_, sysfs := card(t)
	ended := make(chan struct{})
	defer close(ended)
	b := vfio.NewBinder(removing{sysfs, gpu, ended})
	if err := b.Take(soon(t), gpu); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "does not finish a read of bus/pci/devices/"+gpu+"/driver_override") {
		t.Errorf("it is removed: %v", err)
	}
	if _, err := b.Override(soon(t), gpu); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "an earlier read or write") {
		t.Errorf("it is still removed: %v", err)
	}
	if err := b.Take(t.Context(), sound); err != nil {
		t.Errorf("another function: %v", err)
	}
}

// TestASessionHoldsTheGPU: NVML has every GPU open.
func TestASessionHoldsTheGPU(t *testing.T) {
	machine, sysfs := card(t)
	b, lib, users := vfio.NewBinder(sysfs), machine.NVML(), vfio.Simulated{Machine: machine}
	if ret := lib.Init(); ret != 0 {
		t.Fatal(ret)
	}
	if pids, _ := users.Of(t.Context(), "/dev/nvidia0"); fmt.Sprint(pids) != fmt.Sprint([]int{os.Getpid()}) {
		t.Errorf("users %v", pids)
	}
	if err := b.Take(soon(t), gpu); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a session: %v", err)
	}
	lib.Shutdown()
	if err := b.Take(t.Context(), gpu); err != nil {
		t.Errorf("without one: %v", err)
	}
	lib.Init()
	defer lib.Shutdown()
	if n, _ := lib.DeviceGetCount(); n != 7 {
		t.Errorf("NVML has %d GPUs", n)
	}
	if pids, _ := users.Of(t.Context(), "/dev/nvidia0"); pids != nil {
		t.Errorf("users %v of a GPU that NVML does not have", pids)
	}
}

// TestTheSimulatedKernelRefusesWhatARealOneDoes checks the errors that the rules of binding have.
func TestTheSimulatedKernelRefusesWhatARealOneDoes(t *testing.T) {
	machine, sysfs := card(t)
	const vfioPCI, nvidia = "bus/pci/drivers/vfio-pci/", "bus/pci/drivers/nvidia/"
	refused := func(name, value string, want error) {
		t.Helper()
		if err := sysfs.Write(name, value); !errors.Is(err, want) {
			t.Errorf("write %s to %s: %v, want %v", value, name, err, want)
		}
	}
	refused(vfioPCI+"unbind", gpu, unix.ENODEV) // it is another driver's
	write(t, sysfs, nvidia+"unbind", gpu)
	refused(nvidia+"unbind", gpu, unix.ENODEV) // it has none
	refused(vfioPCI+"bind", gpu, unix.ENODEV)  // nothing says that vfio-pci may have it
	write(t, sysfs, "bus/pci/devices/"+gpu+"/driver_override", "vfio-pci")
	refused(nvidia+"bind", gpu, unix.ENODEV) // only vfio-pci may have it
	refused("bus/pci/drivers/nouveau/bind", gpu, unix.ENOENT)
	write(t, sysfs, vfioPCI+"bind", gpu)
	refused(vfioPCI+"bind", gpu, unix.EBUSY)
	write(t, sysfs, "bus/pci/drivers/snd_hda_intel/unbind", sound)
	do(t, machine, &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 7, Kind: nvmlsim.ProcessVM}})
	refused("bus/pci/drivers/snd_hda_intel/bind", sound, unix.EBUSY) // the group is a virtual machine's
	do(t, machine, &nvmlsim.Reboot{})
	if now := is(t, sysfs, gpu) + " " + is(t, sysfs, sound); now != "nvidia/ snd_hda_intel/" {
		t.Errorf("after a reboot they are with %s", now)
	}
}

func write(t *testing.T, sysfs vfio.Sysfs, name, value string) {
	t.Helper()
	if err := sysfs.Write(name, value); err != nil {
		t.Fatal(err)
	}
}

func do(t *testing.T, machine *nvmlsim.Machine, c nvmlsim.Command) {
	t.Helper()
	if _, err := machine.Do(c); err != nil {
		t.Fatal(err)
	}
}
