package nvmlsim

import (
	"fmt"
	"io/fs"
	"path"
	"strings"
	"testing/fstest"
)

// Classes of PCI devices, as in the class file.
const (
	class3DController = "0x030200"
	classPCIBridge    = "0x060400"
)

// Sysfs returns a tree like the machine's /sys: the PCI devices from the root
// complexes to the GPUs, with what the kernel says about each, and the links in
// bus/pci/devices. os.CopyFS writes it to a folder.
func (l *Library) Sysfs() fs.ReadLinkFS {
	tree := fstest.MapFS{}
	for _, d := range l.devices {
		addDevice(tree, d.path.sysfs(0), class3DController, d.gpu.NUMANode, map[string]string{
			"vendor":             fmt.Sprintf("0x%04x", d.model.PCIDeviceID&0xffff),
			"device":             fmt.Sprintf("0x%04x", d.model.PCIDeviceID>>16),
			"subsystem_vendor":   fmt.Sprintf("0x%04x", d.model.PCISubsystemID&0xffff),
			"subsystem_device":   fmt.Sprintf("0x%04x", d.model.PCISubsystemID>>16),
			"current_link_width": fmt.Sprint(d.model.PCIe.Width),
			"max_link_width":     fmt.Sprint(d.model.PCIe.Width),
		})
		for depth := 1; depth <= len(d.path.bridges); depth++ {
			addDevice(tree, d.path.sysfs(depth), classPCIBridge, d.gpu.NUMANode, nil)
		}
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
