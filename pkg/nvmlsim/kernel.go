// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Drivers that functions of a card can have, beside those that a profile names.
const (
	driverNVIDIA = "nvidia"
	driverVFIO   = "vfio-pci"
)

// FunctionState is what changes of one function of a card.
type FunctionState struct {
	// Driver that has the function; empty for none.
	Driver string `json:"driver,omitempty"`
	// Override is the only driver that may have it; empty for any that matches.
	Override string `json:"override,omitempty"`
}

// usual is what the functions of a card are after a boot.
func (m *Model) usual() []FunctionState {
	functions := []FunctionState{{Driver: driverNVIDIA}}
	for _, f := range m.Functions {
		functions = append(functions, FunctionState{Driver: f.Driver})
	}
	return functions
}

// functions of the card: the GPU, and the model's others. The result may be changed.
func (g *GPUState) functions(m *Model) []FunctionState {
	if g.Functions == nil {
		return m.usual()
	}
	return slices.Clone(g.Functions)
}

// setFunctions keeps them. What they are after a boot is not written down, so
// that a state of before is the same state.
func (g *GPUState) setFunctions(m *Model, functions []FunctionState) {
	if slices.Equal(functions, m.usual()) {
		functions = nil
	}
	g.Functions = functions
}

// Detached GPUs are not the NVIDIA driver's, and so not NVML's.
func (g *GPUState) Detached() bool {
	return len(g.Functions) > 0 && g.Functions[0].Driver != driverNVIDIA
}

// passedThrough GPUs can be opened by a virtual machine's process.
func (g *GPUState) passedThrough() bool {
	return len(g.Functions) > 0 && g.Functions[0].Driver == driverVFIO
}

// iommuGroup is the number of the group that a card has for itself.
func iommuGroup(index int) int { return 20 + index }

// Write does what the kernel does when the value is written to a file of the
// tree: driver_override of a function, unbind of its driver, bind of a driver.
// As in the kernel, unbind waits as long as somebody has the function open, and
// its answer to what it does not do is an errno in a [fs.PathError].
//
// A library of the same process that has a session open has every GPU open.
func (s *sysfs) Write(name, value string) error {
	err := s.lib.machine.writeSysfs(name, strings.TrimSuffix(value, "\n"))
	if err != nil {
		return &fs.PathError{Op: "write", Path: name, Err: err}
	}
	return nil
}

func (m *Machine) writeSysfs(name, value string) error {
	parts := strings.Split(name, "/")
	if len(parts) < 5 || parts[0] != "bus" || parts[1] != "pci" {
		return unix.EACCES
	}
	switch file := strings.Join(parts[4:], "/"); {
	case parts[2] == "devices" && file == "driver_override":
		return m.onFunction(parts[3], func(_ *State, f *FunctionState, _ place) error {
			f.Override = value
			return nil
		})
	case parts[2] == "devices" && file == "driver/unbind":
		if value != parts[3] {
			return unix.ENODEV
		}
		return m.unbind(value, "")
	case parts[2] == "drivers" && file == "unbind":
		return m.unbind(value, parts[3])
	case parts[2] == "drivers" && file == "bind":
		return m.onFunction(value, func(s *State, f *FunctionState, at place) error { return m.bind(s, f, at, parts[3]) })
	}
	return unix.EACCES
}

// place of a function: the GPU's index, and the function's number on its card.
type place struct{ gpu, function int }

// onFunction changes a function in one step.
func (m *Machine) onFunction(address string, f func(*State, *FunctionState, place) error) error {
	at, err := m.place(address)
	if err != nil {
		return err
	}
	return m.update(func(s *State) error {
		g := &s.GPUs[at.gpu]
		if g.Absent {
			return unix.ENODEV
		}
		functions := g.functions(&m.profile.GPU)
		if err := f(s, &functions[at.function], at); err != nil {
			return err
		}
		g.setFunctions(&m.profile.GPU, functions)
		return nil
	})
}

func (m *Machine) place(address string) (place, error) {
	for i := range m.profile.GPUs {
		p, err := parsePCIPath(m.profile.GPUs[i].PCI)
		if err != nil {
			continue // a profile is validated
		}
		for n := range 1 + len(m.profile.GPU.Functions) {
			a := p.address
			a.function += uint32(n)
			if a.String() == address {
				return place{i, n}, nil
			}
		}
	}
	return place{}, unix.ENODEV
}

// unbind takes the function from its driver, which has to be that one unless it is empty. It waits until nobody uses the GPU.
func (m *Machine) unbind(address, driver string) error {
	for {
		_, changed := m.look()
		busy := false
		err := m.onFunction(address, func(s *State, f *FunctionState, at place) error {
			if f.Driver == "" || driver != "" && f.Driver != driver {
				return unix.ENODEV
			}
			if busy = m.holds(s, at); busy {
				return errUnchanged
			}
			f.Driver = ""
			return nil
		})
		if !busy {
			return err
		}
		m.await(changed)
	}
}

// holds tells whether somebody keeps a driver from letting go of the function.
func (m *Machine) holds(s *State, at place) bool {
	g := &s.GPUs[at.gpu]
	return at.function == 0 && (len(g.Processes) > 0 || !g.Detached() && (len(s.ClientsOf(at.gpu)) > 0 || m.InUse()))
}

// bind gives the function to a driver.
func (m *Machine) bind(s *State, f *FunctionState, at place, driver string) error {
	usual := m.profile.GPU.usual()[at.function].Driver
	g := &s.GPUs[at.gpu]
	matches := driver == usual
	if f.Override != "" {
		matches = driver == f.Override
	}
	switch {
	case driver != usual && driver != driverVFIO, driver == driverNVIDIA && !s.Driver.Loaded:
		return unix.ENOENT
	case !matches:
		return unix.ENODEV
	case f.Driver != "", driver != driverVFIO && g.passedThrough() && len(g.Processes) > 0:
		return unix.EBUSY
	case g.Lost && at.function == 0:
		return unix.EIO
	}
	f.Driver = driver
	if driver == driverNVIDIA {
		hung := g.Hung
		g.powerOn(m.profile, at.gpu)
		g.Hung = hung
		g.Persistence = false // the daemon sets it when the machine starts
	}
	return nil
}

// addFunctions adds to a tree what it has of a GPU's card beyond the GPU's facts.
func (l *Library) addFunctions(tree addTo, d *device, g *GPUState, loaded bool) {
	group := path.Join("kernel/iommu_groups", fmt.Sprint(iommuGroup(d.index)))
	tree.file(path.Join(group, "type"), "DMA")
	for n, f := range g.functions(d.model) {
		at := d.path
		at.address.function += uint32(n)
		folder := path.Join("devices", at.sysfs(0))
		if n > 0 {
			other := d.model.Functions[n-1]
			tree.device(at.sysfs(0), other.Class, d.gpu.NUMANode, map[string]string{
				"vendor": fmt.Sprintf("0x%04x", d.model.PCIDeviceID&0xffff),
				"device": other.Device,
			})
		}
		override := "(null)"
		if f.Override != "" {
			override = f.Override
		}
		tree.file(path.Join(folder, "driver_override"), override)
		tree.file(path.Join(folder, "reset_method"), "flr bus")
		tree.link(path.Join(folder, "iommu_group"), group)
		tree.link(path.Join(group, "devices", at.address.String()), folder)
		if f.Driver != "" && (f.Driver != driverNVIDIA || loaded) {
			driver := path.Join("bus/pci/drivers", f.Driver)
			tree.link(path.Join(folder, "driver"), driver)
			tree.link(path.Join(driver, at.address.String()), folder)
		}
		if f.Driver == driverVFIO {
			tree.file(path.Join(folder, "vfio-dev", fmt.Sprintf("vfio%d", 8*d.index+n), "dev"), fmt.Sprintf("511:%d", 8*d.index+n))
		}
	}
}

// addDrivers adds the drivers that there are, and that the kernel has an IOMMU.
func (l *Library) addDrivers(tree addTo, loaded bool) {
	drivers := []string{driverVFIO}
	if loaded {
		drivers = append(drivers, driverNVIDIA)
	}
	for _, f := range l.profile.GPU.Functions {
		drivers = append(drivers, f.Driver)
	}
	for _, driver := range drivers {
		for _, file := range []string{"bind", "unbind"} {
			tree.file(path.Join("bus/pci/drivers", driver, file), "")
		}
	}
	tree.file("class/misc/iommu/dev", "10:127")
}

// addVM starts the process of a virtual machine that has the GPU's IOMMU group open.
func (g *GPUState) addVM(c *AddProcess) error {
	switch {
	case !g.passedThrough():
		return fmt.Errorf("kind: %q: the GPU does not have the driver %s", c.Kind, driverVFIO)
	case c.PID == 0:
		return fmt.Errorf("pid: 0: want the process's ID")
	}
	g.Processes = append(g.Processes, c.Process)
	return nil
}

// Nodes are the device nodes of a GPU: the NVIDIA driver's, and that of its IOMMU group.
func (m *Machine) Nodes(gpu int) (driver, group string) {
	return fmt.Sprintf("/dev/nvidia%d", m.profile.minor(gpu)), fmt.Sprintf("/dev/vfio/%d", iommuGroup(gpu))
}
