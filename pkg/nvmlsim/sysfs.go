package nvmlsim

import (
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
func (l *Library) Sysfs() fs.ReadLinkFS { return &sysfs{lib: l} }

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
	tree := fstest.MapFS{}
	for _, d := range l.devices {
		for depth := 1; depth <= len(d.path.bridges); depth++ {
			addDevice(tree, d.path.sysfs(depth), classPCIBridge, d.gpu.NUMANode, nil)
		}
		g := &state.GPUs[d.index]
		if g.Absent {
			continue
		}
		addDevice(tree, d.path.sysfs(0), class3DController, d.gpu.NUMANode, map[string]string{
			"vendor":             fmt.Sprintf("0x%04x", d.model.PCIDeviceID&0xffff),
			"device":             fmt.Sprintf("0x%04x", d.model.PCIDeviceID>>16),
			"subsystem_vendor":   fmt.Sprintf("0x%04x", d.model.PCISubsystemID&0xffff),
			"subsystem_device":   fmt.Sprintf("0x%04x", d.model.PCISubsystemID>>16),
			"current_link_width": fmt.Sprint(d.pcie(g).Width),
			"max_link_width":     fmt.Sprint(d.model.PCIe.Width),
		})
	}
	return tree
}

// addDevice adds a folder below devices and the bus's link to it.
func addDevice(tree fstest.MapFS, devicePath, class string, numaNode int, files map[string]string) {
	folder := path.Join("devices", devicePath)
	add := func(name, content string) {
		tree[path.Join(folder, name)] = &fstest.MapFile{Data: []byte(content + "\n"), Mode: 0o444}
	}
	add("class", class)
	add("numa_node", fmt.Sprint(numaNode))
	for name, content := range files {
		add(name, content)
	}
	// Link targets are relative, as the kernel's are.
	tree[path.Join("bus/pci/devices", path.Base(devicePath))] = &fstest.MapFile{
		Data: []byte(strings.Repeat("../", 3) + folder),
		Mode: fs.ModeSymlink | 0o777,
	}
}
