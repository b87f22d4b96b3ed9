// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
)

const (
	train = types.UID("7b6b5d2e-0000-4000-8000-000000000001")
	serve = types.UID("7b6b5d2e-0000-4000-8000-000000000002")
)

func gpu(minor int) cdi.GPU {
	return cdi.GPU{Name: fmt.Sprintf("gpu-0000-%02x-00-0", minor), UUID: fmt.Sprintf("GPU-%d", minor), Minor: minor}
}

func device(request string, minor int) cdi.Device {
	return cdi.Device{Request: request, Name: gpu(minor).Name, GPU: gpu(minor)}
}

// procRoot is a /proc where 120 is taken by a driver.
func procRoot(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	devices := "Character devices:\n  1 mem\n120 something\n195 nvidia\n\nBlock devices:\n  7 loop\n"
	if err := os.WriteFile(filepath.Join(root, "devices"), []byte(devices), 0o600); err != nil {
		t.Fatal(err)
	}
	return root
}

// simulated returns a backend for a machine where the agent may not make device nodes, which needs no root.
func simulated(t *testing.T) *cdi.Simulated {
	t.Helper()
	backend, err := cdi.NewSimulated(t.Context(), cdi.SimulatedOptions{
		DevRoot:  filepath.Join(t.TempDir(), "dev"),
		ProcRoot: procRoot(t),
		Mknod:    func(string, uint32, int) error { return unix.EPERM },
	})
	if err != nil {
		t.Fatal(err)
	}
	return backend
}

func write(t *testing.T, store *cdi.Store, backend cdi.Backend, claim types.UID, devices ...cdi.Device) {
	t.Helper()
	spec, err := cdi.BuildSpec(t.Context(), backend, claim, devices)
	if err != nil {
		t.Fatal(err)
	}
	data, err := cdi.Encode(spec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Restore(claim, data); err != nil {
		t.Fatal(err)
	}
}

// inject does what a container runtime does with the CDI names that the kubelet passes on.
func inject(t *testing.T, dir string, ids ...string) *oci.Spec {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	container := &oci.Spec{Process: &oci.Process{Env: []string{"PATH=/bin"}}}
	if unresolved, err := cache.InjectDevices(container, ids...); err != nil {
		t.Fatalf("inject: %v, unresolved %v", err, unresolved)
	}
	return container
}

func TestContainersSeeTheirOwnGPUs(t *testing.T) {
	store := cdi.NewStore(durable.OS{}, filepath.Join(t.TempDir(), "cdi"), "/")
	backend := simulated(t)
	write(t, store, backend, train, device("big", 0), device("big", 1), device("either/h100", 2))
	write(t, store, backend, serve, device("gpu", 3))
	id := cdi.DeviceID
	big := []string{id(train, "big", gpu(0).Name), id(train, "big", gpu(1).Name)}
	either := []string{id(train, "either/h100", gpu(2).Name)}
	served := []string{id(serve, "gpu", gpu(3).Name)}

	tests := map[string]struct {
		ids []string
		// minors of the device nodes, and so of the STOWAGE variables.
		minors  []int
		visible string
	}{
		"one request of several GPUs":      {ids: big, minors: []int{0, 1}, visible: "GPU-0,GPU-1"},
		"one alternative of a request":     {ids: either, minors: []int{2}, visible: "GPU-2"},
		"two requests of a claim":          {ids: slices.Concat(big, either), minors: []int{0, 1, 2}, visible: "GPU-2"},
		"two claims":                       {ids: slices.Concat(big, served), minors: []int{0, 1, 3}, visible: "GPU-3"},
		"two claims, one of them in parts": {ids: slices.Concat(served, either), minors: []int{2, 3}, visible: "GPU-2"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			container := inject(t, store.Dir(), tc.ids...)
			want := []string{"/dev/nvidia-uvm", "/dev/nvidiactl"}
			var wantEnv []string
			for _, minor := range tc.minors {
				want = append(want, fmt.Sprintf("/dev/nvidia%d", minor))
				wantEnv = append(wantEnv, fmt.Sprintf("STOWAGE_GPU_0000_%02X_00_0=GPU-%d", minor, minor))
			}
			var got, gotEnv []string
			visible := ""
			for _, node := range container.Linux.Devices {
				got = append(got, node.Path)
				if node.Major != 121 {
					t.Errorf("%s has major %d, want the first free one, 121", node.Path, node.Major)
				}
			}
			for _, env := range container.Process.Env {
				if strings.HasPrefix(env, "STOWAGE_") {
					gotEnv = append(gotEnv, env)
				}
				if value, ok := strings.CutPrefix(env, "NVIDIA_VISIBLE_DEVICES="); ok {
					visible = value
				}
			}
			slices.Sort(want)
			slices.Sort(got)
			slices.Sort(gotEnv)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("device nodes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(wantEnv, gotEnv); diff != "" {
				t.Errorf("variables (-want +got):\n%s", diff)
			}
			if visible != tc.visible {
				t.Errorf("NVIDIA_VISIBLE_DEVICES is %q, want %q", visible, tc.visible)
			}
			allowed := map[string]bool{}
			for _, rule := range container.Linux.Resources.Devices {
				allowed[fmt.Sprintf("%v %s %d:%d %s", rule.Allow, rule.Type, *rule.Major, *rule.Minor, rule.Access)] = true
			}
			wantAllowed := map[string]bool{"true c 121:255 rw": true, "true c 121:253 rw": true}
			for _, minor := range tc.minors {
				wantAllowed[fmt.Sprintf("true c 121:%d rw", minor)] = true
			}
			if diff := cmp.Diff(wantAllowed, allowed); diff != "" {
				t.Errorf("devices that the cgroup admits (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNamesFollowFromTheClaimAndNeverMeet(t *testing.T) {
	seen := map[string]string{}
	for _, parts := range [][3]string{
		{"u-1", "a", "b-c"}, {"u-1", "a-b", "c"}, {"u-1", "a/b", "c"}, {"u-1-a", "b", "c"}, {"u-1", "a", "b"},
	} {
		id := cdi.DeviceID(types.UID(parts[0]), parts[1], parts[2])
		if other, taken := seen[id]; taken {
			t.Errorf("%v and %s have the same CDI name %s", parts, other, id)
		}
		seen[id] = fmt.Sprint(parts)
		if !strings.HasPrefix(id, "k8s.gpu.nvidia.com/claim=") {
			t.Errorf("CDI name %s", id)
		}
	}
}

func TestVerifyFindsWhatARuntimeWouldStumbleOver(t *testing.T) {
	requireMknod(t)
	id := cdi.DeviceID(train, "gpu", gpu(0).Name)
	tests := map[string]struct {
		damage func(t *testing.T, store *cdi.Store, node string)
		ids    []string
		want   string
	}{
		"nothing wrong": {},
		"file missing": {
			damage: func(t *testing.T, store *cdi.Store, _ string) { must(t, os.Remove(store.Path(train))) },
			want:   "no such file",
		},
		"file truncated": {
			damage: func(t *testing.T, store *cdi.Store, _ string) { must(t, os.Truncate(store.Path(train), 40)) },
			want:   "parse",
		},
		"device of another claim": {
			ids:  []string{cdi.DeviceID(serve, "gpu", gpu(0).Name)},
			want: "is not in",
		},
		"device node missing": {
			damage: func(t *testing.T, _ *cdi.Store, node string) { must(t, os.Remove(node)) },
			want:   "no such file",
		},
		"device node is a file": {
			damage: func(t *testing.T, _ *cdi.Store, node string) {
				must(t, os.Remove(node))
				must(t, os.WriteFile(node, nil, 0o600))
			},
			want: "is no character device",
		},
		"device node of another GPU": {
			damage: func(t *testing.T, _ *cdi.Store, node string) {
				must(t, os.Remove(node))
				must(t, os.Rename(strings.TrimSuffix(node, "0")+"1", node))
			},
			want: "c 121:1, the CDI specification says c 121:0",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			store := cdi.NewStore(durable.OS{}, t.TempDir(), "/")
			devRoot := t.TempDir()
			backend, err := cdi.NewSimulated(t.Context(), cdi.SimulatedOptions{DevRoot: devRoot, ProcRoot: procRoot(t)})
			must(t, err)
			write(t, store, backend, serve, device("gpu", 1))
			write(t, store, backend, train, device("gpu", 0))
			if tc.damage != nil {
				tc.damage(t, store, filepath.Join(devRoot, "nvidia0"))
			}
			ids := tc.ids
			if ids == nil {
				ids = []string{id}
			}
			err = store.Verify(train, ids)
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("Verify: %v", err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("Verify: %v, want an error with %q", err, tc.want)
			}
		})
	}
}

func TestOnlyTheClaimsOwnFileIsRemoved(t *testing.T) {
	dir := t.TempDir()
	store := cdi.NewStore(durable.OS{}, dir, "/")
	backend := simulated(t)
	write(t, store, backend, train, device("gpu", 0))
	write(t, store, backend, serve, device("gpu", 1))
	if err := store.Remove(train, store.Path(serve)); err == nil {
		t.Error("another claim's file was removed")
	}
	for range 2 {
		must(t, store.Remove(train, store.Path(train)))
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	must(t, err)
	if diff := cmp.Diff([]string{store.Path(serve)}, left); diff != "" {
		t.Errorf("files left (-want +got):\n%s", diff)
	}
}

func TestSimulationIsRefusedBesideARealDriver(t *testing.T) {
	proc := procRoot(t)
	must(t, os.MkdirAll(filepath.Join(proc, "driver", "nvidia"), 0o755))
	dev := filepath.Join(t.TempDir(), "dev")
	_, err := cdi.NewSimulated(context.Background(), cdi.SimulatedOptions{DevRoot: dev, ProcRoot: proc})
	if err == nil || !strings.Contains(err.Error(), "real NVIDIA driver") {
		t.Errorf("error %v, want one that names the real driver", err)
	}
	if _, err := os.Stat(dev); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the device folder was made all the same: %v", err)
	}
}

func TestSimulatedNodesAreNeverMadeInDev(t *testing.T) {
	for _, root := range []string{"/dev", "/dev/", "/dev/../dev", "/"} {
		if _, err := cdi.NewSimulated(t.Context(), cdi.SimulatedOptions{DevRoot: root, ProcRoot: procRoot(t)}); err == nil {
			t.Errorf("device folder %s was accepted", root)
		}
	}
}

// requireMknod skips where device nodes cannot be made, which is a privilege.
func requireMknod(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making device nodes needs root: run this test as root")
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
