// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"sync"
	"testing/fstest"
)

// Classes of PCI devices, as in the class file.
const (
	class3DController = "0x030200"
	classPCIBridge    = "0x060400"
)

// Sysfs returns a tree like the machine's /sys: the PCI devices from the root
// complexes to the GPUs, with what the kernel says about each, and the links in
// bus/pci/devices. It follows the machine: a GPU that is removed is not there.
// os.CopyFS writes it to a folder.
func (l *Library) Sysfs() Sysfs { return &sysfs{lib: l} }

// Sysfs is such a tree. Write is the kernel's answer to a value that is written to one of its files.
type Sysfs interface {
	fs.ReadLinkFS
	Write(name, value string) error
}

// sysfs has a tree for the state that the machine was last seen in.
type sysfs struct {
	lib *Library

	mu   sync.Mutex
	of   *State
	made fstest.MapFS
}

func (s *sysfs) Open(name string) (fs.File, error)          { return s.tree().Open(name) }
func (s *sysfs) ReadLink(name string) (string, error)       { return s.tree().ReadLink(name) }
func (s *sysfs) Lstat(name string) (fs.FileInfo, error)     { return s.tree().Lstat(name) }
func (s *sysfs) ReadFile(name string) ([]byte, error)       { return s.tree().ReadFile(name) }
func (s *sysfs) ReadDir(name string) ([]fs.DirEntry, error) { return s.tree().ReadDir(name) }

func (s *sysfs) tree() fstest.MapFS {
	state := s.lib.machine.State()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of != state {
		s.of, s.made = state, s.lib.sysfsTree(state)
	}
	return s.made
}

func (l *Library) sysfsTree(state *State) fstest.MapFS {
	tree := addTo{}
	l.addDrivers(tree, state.Driver.Loaded)
	for _, d := range l.devices {
		for depth := 1; depth <= len(d.path.bridges); depth++ {
			width := d.model.PCIe.Width
			if depth == 1 {
				width = d.model.PCIe.port()
			}
			tree.device(d.path.sysfs(depth), classPCIBridge, d.gpu.NUMANode, map[string]string{"max_link_width": fmt.Sprint(width)})
		}
		g := &state.GPUs[d.index]
		if g.Absent {
			continue
		}
		tree.device(d.path.sysfs(0), class3DController, d.gpu.NUMANode, map[string]string{
			"vendor":             fmt.Sprintf("0x%04x", d.model.PCIDeviceID&0xffff),
			"device":             fmt.Sprintf("0x%04x", d.model.PCIDeviceID>>16),
			"subsystem_vendor":   fmt.Sprintf("0x%04x", d.model.PCISubsystemID&0xffff),
			"subsystem_device":   fmt.Sprintf("0x%04x", d.model.PCISubsystemID>>16),
			"current_link_width": fmt.Sprint(d.pcie(g).Width),
			"max_link_width":     fmt.Sprint(d.model.PCIe.Width),
		})
		tree[path.Join("devices", d.path.sysfs(0), "config")] = &fstest.MapFile{Data: d.configSpace(g), Mode: 0o644}
		l.addFunctions(tree, d, g, state.Driver.Loaded)
	}
	return fstest.MapFS(tree)
}

// configSpace is the beginning of the GPU's PCI configuration, as anybody may
// read it. A device that has fallen off the bus does not answer, and a read that
// is not answered gives all ones (PCI Express Base Specification, 2.3.2).
func (d *device) configSpace(g *GPUState) []byte {
	config := make([]byte, 64)
	if g.Lost {
		return bytes.Repeat([]byte{0xff}, len(config))
	}
	binary.LittleEndian.PutUint16(config, uint16(d.model.PCIDeviceID))
	binary.LittleEndian.PutUint16(config[2:], uint16(d.model.PCIDeviceID>>16))
	return config
}

// addTo is a tree that is being made.
type addTo fstest.MapFS

// device adds a folder below devices and the bus's link to it.
func (t addTo) device(devicePath, class string, numaNode int, files map[string]string) {
	folder := path.Join("devices", devicePath)
	t.file(path.Join(folder, "class"), class)
	t.file(path.Join(folder, "numa_node"), fmt.Sprint(numaNode))
	for name, content := range files {
		t.file(path.Join(folder, name), content)
	}
	t.link(path.Join("bus/pci/devices", path.Base(devicePath)), folder)
}

func (t addTo) file(name, content string) {
	t[name] = &fstest.MapFile{Data: []byte(content + "\n"), Mode: 0o444}
}

// link adds a link with a relative target, as the kernel's are.
func (t addTo) link(name, target string) {
	t[name] = &fstest.MapFile{
		Data: []byte(strings.Repeat("../", strings.Count(name, "/")) + target),
		Mode: fs.ModeSymlink | 0o777,
	}
}
