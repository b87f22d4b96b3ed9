// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim_test

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// A machine of eight H100. A GPU falls off the bus, and NVML says so.
func ExampleMachine_Do() {
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		fmt.Println(err)
		return
	}
	machine := nvmlsim.NewMachine(profile, "node-1")
	library := machine.NVML()
	library.Init()
	defer library.Shutdown()
	count, _ := library.DeviceGetCount()
	gpu, _ := library.DeviceGetHandleByIndex(0)
	name, _ := gpu.GetName()
	fmt.Println(count, name)

	if _, err := machine.Do(&nvmlsim.LoseGPU{GPU: "0"}); err != nil {
		fmt.Println(err)
		return
	}
	_, answer := gpu.GetTemperature(nvml.TEMPERATURE_GPU)
	fmt.Println("lost:", answer == nvml.ERROR_GPU_IS_LOST)
	// Output:
	// 8 NVIDIA H100 80GB HBM3
	// lost: true
}
