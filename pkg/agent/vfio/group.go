// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
)

const (
	// Driver is the kernel's for functions that a virtual machine gets.
	Driver = "vfio-pci"

	devices = "bus/pci/devices"
	drivers = "bus/pci/drivers"
	groups  = "kernel/iommu_groups"

	nvidiaVendor = "0x10de"
	displayClass = "0x03"
	// A function whose class begins so connects buses.
	bridgeClass = "0x06"
)

// Of the bridges these have a second bus, which is what makes the kernel's VFIO leave them out.
var busBridges = []string{"0x0604", "0x0607", "0x0609"}

// Function is one PCI function.
type Function struct {
	// Address as the kernel writes it: 0000:1b:00.0.
	Address string
	// Class, Vendor and Device as sysfs has them: 0x030200, 0x10de, 0x2330.
	Class, Vendor, Device string
	// Driver that has the function, empty for none.
	Driver string
}

// ReadFunction returns what the kernel says of a function. The error wraps fs.ErrNotExist if there is none. It reads nothing for which the
// kernel takes the function's lock: somebody who removes the function may hold that for ever.
func ReadFunction(fsys fs.ReadLinkFS, address string) (Function, error) {
	f := Function{Address: address}
	at := devices + "/" + address + "/"
	var err error
	if f.Class, err = read(fsys, at+"class"); err != nil {
		return f, fmt.Errorf("PCI function %s: %w", address, err)
	}
	// Of what is left out there is nothing to be known, or it shows when it is needed.
	f.Vendor, _ = read(fsys, at+"vendor")
	f.Device, _ = read(fsys, at+"device")
	if f.Driver, err = linked(fsys, at+"driver"); err != nil {
		return f, fmt.Errorf("PCI function %s: its driver: %w", address, err)
	}
	return f, nil
}

// readOverride returns the only driver that may have the function, empty for any that matches. It may not return: the kernel takes the
// function's lock for it.
func readOverride(fsys fs.FS, address string) (string, error) {
	override, err := read(fsys, overrideOf(address))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("PCI function %s: %w", address, err)
	}
	if override == "(null)" {
		return "", nil
	}
	return override, nil
}

func overrideOf(address string) string { return devices + "/" + address + "/driver_override" }

// Gone tells whether the function does not answer on the bus any more: the kernel has let go of it, or its configuration reads as all ones,
// which is what the bus gives for a read that nobody answers. What cannot be read is no proof.
func Gone(fsys fs.ReadLinkFS, address string) bool {
	config, err := fsys.Open(devices + "/" + address + "/config")
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) && !exists(fsys, devices+"/"+address) && exists(fsys, devices)
	}
	defer config.Close()
	// No more than who it is: a read of what follows is one of the device's registers.
	var id [4]byte
	_, err = io.ReadFull(config, id[:])
	return err == nil && id == [4]byte{0xff, 0xff, 0xff, 0xff}
}

// isGPU tells whether it is one of NVIDIA's.
func (f *Function) isGPU() bool {
	return f.Vendor == nvidiaVendor && strings.HasPrefix(f.Class, displayClass)
}

// GPUs lists NVIDIA's GPUs on the bus, whatever driver has them, in order of their addresses.
func GPUs(fsys fs.ReadLinkFS) ([]Function, error) {
	entries, err := fs.ReadDir(fsys, devices)
	if err != nil {
		return nil, fmt.Errorf("list PCI functions: %w", err)
	}
	var gpus []Function
	for _, entry := range entries {
		class, err := read(fsys, devices+"/"+entry.Name()+"/class")
		if err == nil && !strings.HasPrefix(class, displayClass) {
			continue
		}
		f, err := ReadFunction(fsys, entry.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has just been unplugged
		}
		if err != nil {
			return nil, err
		}
		if f.isGPU() {
			gpus = append(gpus, f)
		}
	}
	return gpus, nil
}

// Group is an IOMMU group that is nothing but one card.
type Group struct {
	// ID is the number in /dev/vfio/<ID>.
	ID string
	// Functions of the card, in order of their addresses.
	Functions []Function
}

// GroupOf returns the IOMMU group of a GPU. The error says why the GPU cannot be passed through: the kernel lacks what
// that takes, or the group has other things in it.
func GroupOf(fsys fs.ReadLinkFS, gpu string) (*Group, error) {
	if !exists(fsys, devices+"/"+gpu) {
		return nil, fmt.Errorf("there is no PCI function %s: %w", gpu, fs.ErrNotExist)
	}
	id, err := linked(fsys, devices+"/"+gpu+"/iommu_group")
	if err != nil {
		return nil, fmt.Errorf("PCI function %s: its IOMMU group: %w", gpu, err)
	}
	if id == "" {
		return nil, errors.New("the IOMMU is off: enable it in the firmware and on the kernel's command line (intel_iommu=on or amd_iommu=on)")
	}
	if !exists(fsys, drivers+"/"+Driver) {
		return nil, fmt.Errorf("the kernel's driver %s is not loaded: use modprobe %s", Driver, Driver)
	}
	members, err := fs.ReadDir(fsys, groups+"/"+id+"/devices")
	if err != nil {
		return nil, fmt.Errorf("IOMMU group %s: %w", id, err)
	}
	group := &Group{ID: id}
	for _, member := range members {
		f, err := ReadFunction(fsys, member.Name())
		if err != nil {
			return nil, err
		}
		switch {
		case slot(f.Address) == slot(gpu):
			group.Functions = append(group.Functions, f)
		case slices.ContainsFunc(busBridges, func(class string) bool { return strings.HasPrefix(f.Class, class) }):
		case strings.HasPrefix(f.Class, bridgeClass) && f.Driver == "":
			// The kernel's VFIO takes a group for whole in which such a one is nobody's.
		default:
			return nil, fmt.Errorf("IOMMU group %s also has %s (class %s, driver %q), which is not of the same card and would go with it: "+
				"put the GPU into another slot, or enable ACS in the firmware", id, f.Address, f.Class, f.Driver)
		}
	}
	if !canReset(fsys, gpu) {
		return nil, errors.New("the kernel has no way to reset the GPU (reset_method in sysfs): what one virtual machine leaves in it the next " +
			"one would find")
	}
	// Its links are counted, because the kernel takes the function's lock to tell their number.
	entries, err := fs.ReadDir(fsys, devices+"/"+gpu)
	if err != nil {
		return nil, fmt.Errorf("PCI function %s: %w", gpu, err)
	}
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return !strings.HasPrefix(e.Name(), "virtfn") })
	if len(entries) > 0 {
		return nil, fmt.Errorf("the GPU has %d virtual functions (vGPU): they would be lost", len(entries))
	}
	return group, nil
}

// canReset tells whether the kernel can reset a function by itself, by a way that is not switched off.
// Kernels before 5.15 do not list the ways.
func canReset(fsys fs.FS, address string) bool {
	ways, err := read(fsys, devices+"/"+address+"/reset_method")
	if errors.Is(err, fs.ErrNotExist) {
		return exists(fsys, devices+"/"+address+"/reset")
	}
	return err == nil && strings.TrimSpace(ways) != ""
}

// slot is the address without the function's number.
func slot(address string) string {
	before, _, _ := strings.Cut(address, ".")
	return before
}

// Node is the group's device node.
func (g *Group) Node() string { return GroupNode(g.ID) }

// GroupNode is the device node of the IOMMU group with that number.
func GroupNode(id string) string { return "/dev/vfio/" + id }

// Nodes of the two interfaces of the kernel by which groups and functions are put into an address space.
const (
	ContainerNode = "/dev/vfio/vfio"
	IOMMUFDNode   = "/dev/iommu"
)

// HasIOMMUFD tells whether the kernel has the newer interface, in which each function is opened by itself.
func HasIOMMUFD(fsys fs.FS) bool { return exists(fsys, "class/misc/iommu") }

// FunctionNode is the device node of a function in the newer interface. There is one once vfio-pci has the function.
func FunctionNode(fsys fs.FS, address string) (string, error) {
	entries, err := fs.ReadDir(fsys, devices+"/"+address+"/vfio-dev")
	if err == nil && len(entries) != 1 {
		err = fmt.Errorf("%d nodes, want 1", len(entries))
	}
	if err != nil {
		return "", fmt.Errorf("device node of PCI function %s: %w", address, err)
	}
	return "/dev/vfio/devices/" + entries[0].Name(), nil
}

// NodesOf are the device nodes by which a group, or a function of it, can be opened now.
func NodesOf(fsys fs.FS, group string) []string {
	nodes := []string{GroupNode(group)}
	members, err := fs.ReadDir(fsys, groups+"/"+group+"/devices")
	if err != nil {
		return nodes // a group without functions has been unplugged
	}
	for _, member := range members {
		if node, err := FunctionNode(fsys, member.Name()); err == nil {
			nodes = append(nodes, node)
		}
	}
	return nodes
}
