// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// looks counts how often nvcdi asks for the driver's version, which it does each time that it looks for the driver's files.
type looks struct {
	nvml.Interface
	n int
}

func (l *looks) SystemGetDriverVersion() (string, nvml.Return) {
	l.n++
	return l.Interface.SystemGetDriverVersion()
}

// commonOf is a backend over stand-ins of a driver's files below root.
func commonOf(t testing.TB) (root string, library **looks, backend *cdi.Driver) {
	t.Helper()
	sim, err := nvmlsim.New("dgx-h100", "node-1")
	must(t, err)
	if ret := sim.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	version, _ := sim.SystemGetDriverVersion()
	loaded := &looks{Interface: sim}
	root, library = driverRoot(t, version), &loaded
	for i := range 40 { // about as many as a real one has
		must(t, os.WriteFile(filepath.Join(root, fmt.Sprintf("usr/lib/x86_64-linux-gnu/libnvidia-%d.so.%s", i, version)), nil, 0o755))
	}
	must(t, unix.Mknod(filepath.Join(root, "dev/nvidia-uvm-tools"), unix.S_IFCHR|0o666, int(unix.Mkdev(4000, 76))))
	return root, library, cdi.NewDriver(cdi.DriverOptions{
		NVML: func() nvml.Interface { return *library }, DriverRoot: root, HookPath: "/hook",
		ProcRoot: procOf(t, "", "121 nvidia", "121 nvidia-uvm"),
	})
}

// TestWhatAllClaimsShareIsFoundOnce, and again when it may be something else.
func TestWhatAllClaimsShareIsFoundOnce(t *testing.T) {
	const later = "usr/lib/x86_64-linux-gnu/libnvidia-later.so."
	for name, tc := range map[string]struct {
		change func(t *testing.T, root, version string)
		// loaded is the library anew.
		loaded bool
		// steady is whether many looks have found the same before the change, after is how long ago that was.
		steady bool
		after  time.Duration
		again  bool
		// has and hasNot are in the names of files.
		has, hasNot string
	}{
		"nothing has changed": {change: func(*testing.T, string, string) {}},
		"a file has come": {
			change: func(t *testing.T, root, version string) {
				must(t, os.WriteFile(filepath.Join(root, later+version), nil, 0o755))
			},
			hasNot: "libnvidia-later",
		},
		"a file has come ten seconds after the first look": {
			change: func(t *testing.T, root, version string) {
				must(t, os.WriteFile(filepath.Join(root, later+version), nil, 0o755))
			},
			after: 10 * time.Second, again: true, has: "libnvidia-later",
		},
		"a file has come four minutes ago, and there have been many looks": {
			change: func(t *testing.T, root, version string) {
				must(t, os.WriteFile(filepath.Join(root, later+version), nil, 0o755))
			},
			steady: true, after: 4 * time.Minute, hasNot: "libnvidia-later",
		},
		"a file has come five minutes ago": {
			change: func(t *testing.T, root, version string) {
				must(t, os.WriteFile(filepath.Join(root, later+version), nil, 0o755))
			},
			steady: true, after: 5 * time.Minute, again: true, has: "libnvidia-later",
		},
		"another library is loaded": {change: func(*testing.T, string, string) {}, loaded: true, again: true},
		"a file is gone": {
			change: func(t *testing.T, root, version string) {
				must(t, os.Remove(filepath.Join(root, "usr/lib/x86_64-linux-gnu/libnvidia-7.so."+version)))
			},
			again: true, has: "libnvidia-8.so", hasNot: "libnvidia-7.so",
		},
		"a device node is gone": {
			change: func(t *testing.T, root, _ string) { must(t, os.Remove(filepath.Join(root, "dev/nvidia-uvm-tools"))) },
			again:  true, has: "/dev/nvidia-uvm", hasNot: "/dev/nvidia-uvm-tools",
		},
		"a device node has another number": {
			change: func(t *testing.T, root, _ string) {
				path := filepath.Join(root, "dev/nvidia-uvm-tools")
				must(t, os.Remove(path))
				must(t, unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(4000, 77))))
			},
			again: true, has: "/dev/nvidia-uvm-tools 4000:77",
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, library, backend := commonOf(t)
			version, _ := (*library).Interface.SystemGetDriverVersion()
			synctest.Test(t, func(t *testing.T) {
				first, err := backend.CommonEdits(t.Context())
				must(t, err)
				looked := (*library).n
				if looked == 0 {
					t.Fatal("nothing was looked for")
				}
				if tc.steady {
					for range 10 {
						time.Sleep(5 * time.Minute)
						_, err := backend.CommonEdits(t.Context())
						must(t, err)
					}
					(*library).n = looked
				}
				// They are the caller's.
				first.Mounts[0].HostPath, first.DeviceNodes[0].Path = "/changed", "/changed"
				tc.change(t, root, version)
				if tc.loaded {
					*library = &looks{(*library).Interface, (*library).n}
				}
				time.Sleep(tc.after)
				for range 2 { // the second one never looks
					edits, err := backend.CommonEdits(t.Context())
					must(t, err)
					var names []string
					for _, mount := range edits.Mounts {
						names = append(names, mount.HostPath)
					}
					for _, node := range edits.DeviceNodes {
						names = append(names, fmt.Sprintf("%s %d:%d", node.Path, node.Major, node.Minor))
					}
					contains := func(text string) bool {
						return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(name, text) })
					}
					if contains("/changed") || !contains(tc.has) || tc.hasNot != "" && contains(tc.hasNot) {
						t.Errorf("found %q; want %q, and not %q", names, tc.has, tc.hasNot)
					}
				}
				want := looked
				if tc.again {
					want = 2 * looked
				}
				if n := (*library).n; n != want {
					t.Errorf("it was looked for %d times, want %d", n/looked, want/looked)
				}
			})
		})
	}
}

func BenchmarkCommonEdits(b *testing.B) {
	_, _, backend := commonOf(b)
	for b.Loop() {
		if _, err := backend.CommonEdits(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// hung is a library whose calls do not return before they are released.
type hung struct {
	nvml.Interface
	inside, released chan struct{}
}

func (h *hung) SystemGetDriverVersion() (string, nvml.Return) {
	close(h.inside)
	<-h.released
	return h.Interface.SystemGetDriverVersion()
}

// TestACallThatHangsKeepsNoOtherClaim whose library is another one.
func TestACallThatHangsKeepsNoOtherClaim(t *testing.T) {
	_, library, backend := commonOf(t)
	good := (*library).Interface
	stuck := &hung{Interface: good, inside: make(chan struct{}), released: make(chan struct{})}
	*library = &looks{Interface: stuck}
	first, second := make(chan error, 1), make(chan error, 1)
	ask := func(to chan<- error) {
		_, err := backend.CommonEdits(t.Context())
		to <- err
	}
	go ask(first)
	<-stuck.inside
	*library = &looks{Interface: good}
	go ask(second)
	select {
	case err := <-second:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it waits for a call of the library before")
	}
	close(stuck.released)
	if err := <-first; err != nil {
		t.Error(err)
	}
}
