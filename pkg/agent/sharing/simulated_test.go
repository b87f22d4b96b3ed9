// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/nvmlsim"
)

func uuidOf(t *testing.T, machine *nvmlsim.Machine, index int) string {
	t.Helper()
	lib := machine.NVML()
	if ret := lib.Init(); ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
	gpu, ret := lib.DeviceGetHandleByIndex(index)
	if ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
	uuid, ret := gpu.GetUUID()
	if ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
	return uuid
}

// A daemon is stopped for each of its GPUs, and these do not wait for each other.
func TestASimulatedDaemonIsStoppedForAllItsGPUsAtOnce(t *testing.T) {
	profile, err := nvmlsim.LoadProfile("t4")
	if err != nil {
		t.Fatal(err)
	}
	machine := nvmlsim.NewMachine(profile, "node")
	uuid := uuidOf(t, machine, 0)
	daemons := NewSimulated(machine).Daemons
	for round := range 500 {
		name := fmt.Sprint("claim-", round)
		if err := daemons.Start(t.Context(), Daemon{Name: name, GPUs: []string{uuid}}); err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				if err := daemons.Stop(t.Context(), name); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
	}
}

// TestASimulatedDaemonCanHaveTheFolderOfARealOne: it comes with the daemon and goes with it, also after an agent that ended between the two.
func TestASimulatedDaemonCanHaveTheFolderOfARealOne(t *testing.T) {
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	machine := nvmlsim.NewMachine(profile, "node")
	mounts := fakeMounts{}
	root := t.TempDir()
	daemons := NewSimulatedWithFolders(machine, DriverOptions{MPSRoot: root, HostRoot: "/", mounts: mounts}).Daemons
	names := []string{"claim-1", "claim-2"}
	for i, name := range names {
		if err := daemons.Start(t.Context(), Daemon{Name: name, GPUs: []string{uuidOf(t, machine, i)}}); err != nil {
			t.Fatal(err)
		}
		for _, mount := range daemons.Edits(name).Mounts {
			if info, err := os.Stat(mount.HostPath); err != nil || !info.IsDir() {
				t.Errorf("%s is shown %s: %v", name, mount.HostPath, err)
			}
		}
	}
	want := fakeMounts{filepath.Join(root, names[0]): DefaultShmBytes, filepath.Join(root, names[1]): DefaultShmBytes}
	if diff := cmp.Diff(want, mounts); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
	// The agent ended when the daemon was gone, and its folder not yet.
	if err := NewSimulated(machine).Daemons.Stop(t.Context(), names[0]); err != nil {
		t.Fatal(err)
	}
	if got, err := daemons.List(); err != nil || !slices.Equal(got, names) {
		t.Errorf("listed are %v, %v", got, err)
	}
	for _, name := range names {
		if err := daemons.Stop(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	if got, err := daemons.List(); err != nil || len(got)+len(mounts) > 0 {
		t.Errorf("left: %v, %v, %v", got, mounts, err)
	}
}
