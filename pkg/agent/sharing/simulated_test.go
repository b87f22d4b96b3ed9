package sharing

import (
	"fmt"
	"sync"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// A daemon is stopped for each of its GPUs, and these do not wait for each other.
func TestASimulatedDaemonIsStoppedForAllItsGPUsAtOnce(t *testing.T) {
	profile, err := nvmlsim.LoadProfile("t4")
	if err != nil {
		t.Fatal(err)
	}
	machine := nvmlsim.NewMachine(profile, "node")
	lib := machine.NVML()
	if ret := lib.Init(); ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
	gpu, ret := lib.DeviceGetHandleByIndex(0)
	if ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
	uuid, ret := gpu.GetUUID()
	if ret != gonvml.SUCCESS {
		t.Fatal(ret)
	}
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
