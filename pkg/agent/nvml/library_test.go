// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

func TestMain(m *testing.M) { os.Exit(librarytest.Main(m)) }

// libraryVariable names a simulated libnvidia-ml.so.1. The tests of this package
// then see simulated GPUs through it, as the agent sees real ones.
const libraryVariable = "STOWAGE_TEST_NVML_LIBRARY"

const seenThrough = "the machine is seen through the C library"

// seen is a machine of that profile, and the narrow view of it: within this
// process, or through the C library, which has the machine's folder.
func seen(t *testing.T, p *nvmlsim.Profile) (*nvmlsim.Machine, Library) {
	t.Helper()
	path := os.Getenv(libraryVariable)
	if path == "" {
		m := nvmlsim.NewMachine(p, "node-a")
		return m, Adapt(m.NVML(), "sim:"+p.Name)
	}
	t.Log(seenThrough)
	m, folder := librarytest.Machine(t, p, "node-a")
	// The profile may be a changed one.
	content, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVMLSIM_PROFILE", writeFile(t, folder, "profile.yaml", string(content)))
	return m, adaptReal(gonvml.New(gonvml.WithLibraryPath(path)), path)
}

// What the agent reads, sets, makes and waits for through the C library is the same as within the process.
func TestTheCLibraryAnswersAsTheSimulationDoes(t *testing.T) {
	if os.Getenv(libraryVariable) != "" {
		t.Skip("this is the run through the C library")
	}
	// The loader finds a library by its name, wherever its file is, once it is loaded.
	tests := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^Test", "-test.skip=^TestAutoNamesThePlacesWhereItLooked$", "-test.v", "-test.timeout=5m")
	tests.Env = append(os.Environ(), libraryVariable+"="+librarytest.Build(t))
	out, err := tests.CombinedOutput()
	if through := strings.Count(string(out), seenThrough); err != nil || through < 30 {
		t.Errorf("%v; %d machines were seen through the C library, want 30 or more:\n%s", err, through, out)
	}
}

// everything is what the agent reads of a GPU.
type everything struct {
	Errors map[string]string
	Facts  map[string]any
}

// readAll reads every fact; what another call made, or time, is not among them.
func readAll(d Device) everything {
	all := everything{Errors: map[string]string{}, Facts: map[string]any{}}
	for name, read := range map[string]func() (any, error){
		"UUID":             func() (any, error) { return d.UUID() },
		"Name":             func() (any, error) { return d.Name() },
		"Brand":            func() (any, error) { return d.Brand() },
		"Architecture":     func() (any, error) { return d.Architecture() },
		"Capability":       func() (any, error) { return d.CUDAComputeCapability() },
		"PCIBusID":         func() (any, error) { return d.PCIBusID() },
		"MinorNumber":      func() (any, error) { return d.MinorNumber() },
		"MemoryBytes":      func() (any, error) { return d.MemoryBytes() },
		"InVirtualMachine": func() (any, error) { return d.InVirtualMachine() },
		"AddressingMode":   func() (any, error) { return d.AddressingMode() },
		"MIGMode":          func() (any, error) { return d.MIGMode() },
		"NVLinks":          func() (any, error) { return d.NVLinks() },
		"Fabric":           func() (any, error) { return d.Fabric() },
		"MIGProfiles":      func() (any, error) { return d.MIGProfiles() },
		"GPUInstances":     func() (any, error) { return d.GPUInstances() },
		"Processes":        func() (any, error) { return d.Processes() },
		"MemoryUsedBytes":  func() (any, error) { return d.MemoryUsedBytes() },
		"ComputeMode":      func() (any, error) { return d.ComputeMode() },
		"Persistence":      func() (any, error) { return d.Persistence() },
		"Readings":         func() (any, error) { return d.Readings() },
	} {
		value, err := read()
		if err != nil {
			var failed *CallError // whose text is another one once the C library is loaded
			if !errors.As(err, &failed) {
				failed = &CallError{Call: err.Error()}
			}
			all.Errors[name] = fmt.Sprint(failed.Call, " ", int(failed.Return))
		}
		all.Facts[name] = value
	}
	return all
}

// Of each simulated machine the same is read through the C library and within the process, whole and partitioned, well and lost.
func TestEveryProfileIsReadAlike(t *testing.T) {
	for _, profile := range nvmlsim.Profiles() {
		t.Run(profile, func(t *testing.T) {
			p, err := nvmlsim.LoadProfile(profile)
			if err != nil {
				t.Fatal(err)
			}
			m, lib := seen(t, p)
			initialized(t, lib)
			within := initialized(t, Adapt(m.NVML(), "within"))
			compare := func(when string) {
				t.Helper()
				for i := range p.GPUs {
					if want, got := readGPU(t, within, i), readGPU(t, lib, i); !cmp.Equal(want, got) {
						t.Errorf("%s, GPU %d (-within +through):\n%s", when, i, cmp.Diff(want, got))
					}
				}
			}
			compare("at first")
			first, err := lib.Device(0)
			if err != nil {
				t.Fatal(err)
			}
			last := strconv.Itoa(len(p.GPUs) - 1)
			if profiles, err := first.MIGProfiles(); err != nil {
				t.Error(err)
			} else if len(profiles) > 0 && profile != "dgx-a100" && profile != "a100-40gb" { // which need a reset
				if err := first.SetMIGMode(true); err != nil {
					t.Fatal(err)
				}
				for _, at := range profiles[0].Placements[:2] {
					id, err := first.CreateGPUInstance(profiles[0], at)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := first.CreateComputeInstance(id); err != nil {
						t.Fatal(err)
					}
				}
				compare("partitioned")
			}
			happen(t, m, &nvmlsim.AddProcess{GPU: last, Process: nvmlsim.Process{PID: 7, Kind: nvmlsim.ProcessCompute, MemoryMiB: 3}},
				&nvmlsim.SetThrottle{GPU: last, Reasons: []string{"hw-slowdown"}})
			compare("in use")
			happen(t, m, &nvmlsim.LoseGPU{GPU: last})
			compare("with a lost GPU")
		})
	}
}

func readGPU(t *testing.T, lib Library, index int) any {
	t.Helper()
	d, err := lib.Device(index)
	if err != nil {
		return errors.Is(err, ErrGPULost)
	}
	return readAll(d)
}

// The library of an old driver lacks functions that the agent asks for: it does without.
func TestTheLibraryOfAnOldDriverIsReadWithoutWhatItLacks(t *testing.T) {
	if os.Getenv(libraryVariable) != "" {
		t.Skip("this is the run through the C library")
	}
	const version = "535.216.03"
	test := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAnOlderDriverHasNoRecoveryAction$/^"+version+"$", "-test.v")
	test.Env = append(os.Environ(), libraryVariable+"="+librarytest.Install(t, t.TempDir(), version))
	if out, err := test.CombinedOutput(); err != nil || strings.Count(string(out), seenThrough) != 1 {
		t.Errorf("%v:\n%s", err, out)
	}
}
