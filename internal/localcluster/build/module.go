// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package build

import (
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed kubernetes containerd
var embedded embed.FS

// moduleFiles are the embedded files of a module.
func moduleFiles(name string) fs.FS {
	files, err := fs.Sub(embedded, name)
	if err != nil {
		panic(err) // only for a name that is no path
	}
	return files
}

// inSuffix ends the names of the embedded files. It keeps the go command from
// seeing a module or a package in these folders.
const inSuffix = ".in"

// program is one main package of a module.
type program struct {
	name string
	// pkg is its import path, or a relative path in the module.
	pkg string
	// from is the module whose version it has; empty for our own helpers.
	from string
	set  Set
	tags string
	// linkerFlags stamp the version; "{version}" is replaced by the version
	// of from, "{minor}" by its minor part.
	linkerFlags string
}

// module is one of the embedded module descriptions.
type module struct {
	name string
	// sources are go.mod, go.sum and our own main packages.
	sources fs.FS
	// versionOf is the module whose version names the cache folder.
	versionOf string
	programs  []program
}

const (
	stampKubernetes = "-X k8s.io/component-base/version.gitVersion={version}" +
		" -X k8s.io/component-base/version.gitMajor=1" +
		" -X k8s.io/component-base/version.gitMinor={minor}" +
		" -X k8s.io/component-base/version.gitTreeState=clean" +
		" -X k8s.io/component-base/version.gitCommit="
	stampContainerd = "-X github.com/containerd/containerd/v2/version.Version={version}"
	stampCNI        = "-X github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion={version}"

	tagsContainerd = "no_btrfs,no_zfs,no_devmapper"
)

var kubernetesModule = module{
	name:      "kubernetes",
	sources:   moduleFiles("kubernetes"),
	versionOf: "k8s.io/kubernetes",
	programs: []program{
		{name: "tether", pkg: "./tether", set: ControlPlane},
		{name: "etcd", pkg: "./etcd", from: "go.etcd.io/etcd/server/v3", set: ControlPlane},
		kubernetesProgram("kube-apiserver", ControlPlane),
		kubernetesProgram("kube-controller-manager", ControlPlane),
		kubernetesProgram("kubectl", ControlPlane),
		kubernetesProgram("kube-scheduler", StockScheduler),
		kubernetesProgram("kubelet", Node),
	},
}

var containerdModule = module{
	name:      "containerd",
	sources:   moduleFiles("containerd"),
	versionOf: "github.com/containerd/containerd/v2",
	programs: []program{
		containerdProgram("containerd"),
		containerdProgram("containerd-shim-runc-v2"),
		containerdProgram("ctr"),
		// Without the seccomp tag, so that no C library is needed.
		{name: "runc", pkg: "github.com/opencontainers/runc", from: "github.com/opencontainers/runc", set: Node},
		cniProgram("ptp", "main/ptp"),
		cniProgram("loopback", "main/loopback"),
		cniProgram("host-local", "ipam/host-local"),
	},
}

func kubernetesProgram(name string, set Set) program {
	return program{
		name: name, pkg: "k8s.io/kubernetes/cmd/" + name, from: "k8s.io/kubernetes",
		set: set, linkerFlags: stampKubernetes,
	}
}

func containerdProgram(name string) program {
	const from = "github.com/containerd/containerd/v2"
	return program{
		name: name, pkg: from + "/cmd/" + name, from: from,
		set: Node, tags: tagsContainerd, linkerFlags: stampContainerd,
	}
}

func cniProgram(name, path string) program {
	const from = "github.com/containernetworking/plugins"
	return program{name: name, pkg: from + "/plugins/" + path, from: from, set: Node, linkerFlags: stampCNI}
}

func (m module) programsOf(sets []Set) []program {
	var programs []program
	for _, p := range m.programs {
		if slices.Contains(sets, p.set) {
			programs = append(programs, p)
		}
	}
	return programs
}

// arguments are those of "go build", without the output.
func (m module) arguments(p program) ([]string, error) {
	args := []string{"-mod=readonly", "-buildvcs=false"}
	if p.tags != "" {
		args = append(args, "-tags="+p.tags)
	}
	ldflags := "-s -w"
	if p.linkerFlags != "" {
		version, err := m.version(p.from)
		if err != nil {
			return nil, err
		}
		parts := strings.SplitN(version, ".", 3)
		ldflags += " " + strings.NewReplacer("{version}", version, "{minor}", parts[1]).Replace(p.linkerFlags)
	}
	return append(args, "-ldflags="+ldflags, p.pkg), nil
}

// title is what progress lines call a program.
func (m module) title(p program) string {
	if p.from == "" {
		return p.name
	}
	return p.name + " " + strings.TrimPrefix(m.mustVersion(p.from), "v")
}

// version is the version of a required module in the module's go.mod.
func (m module) version(path string) (string, error) {
	data, err := fs.ReadFile(m.sources, "go.mod"+inSuffix)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "require "))
		if len(fields) >= 2 && fields[0] == path && strings.Count(fields[1], ".") >= 2 {
			return fields[1], nil
		}
	}
	return "", fmt.Errorf("build module %s does not require %s", m.name, path)
}

// mustVersion is version for the modules that this file names. Their presence
// is tested.
func (m module) mustVersion(path string) string {
	version, err := m.version(path)
	if err != nil {
		panic(err)
	}
	return version
}

// files calls f for each file of the module with its real relative name.
func (m module) files(f func(name string, data []byte) error) error {
	return fs.WalkDir(m.sources, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := fs.ReadFile(m.sources, path)
		if err != nil {
			return err
		}
		name, ok := strings.CutSuffix(path, inSuffix)
		if !ok {
			return fmt.Errorf("file %s of a build module does not end in %s", path, inSuffix)
		}
		return f(name, data)
	})
}

// write makes the module in dir.
func (m module) write(dir string) error {
	return m.files(func(name string, data []byte) error {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.WriteFile(path, data, 0o644)
	})
}

// Modules are the names of the embedded modules.
func Modules() []string { return []string{kubernetesModule.name, containerdModule.name} }

// WriteModule writes an embedded module's files into dir, under their real
// names, so that the go command can work there.
func WriteModule(name, dir string) error {
	for _, m := range []module{kubernetesModule, containerdModule} {
		if m.name == name {
			return m.write(dir)
		}
	}
	return fmt.Errorf("no build module is named %q", name)
}
