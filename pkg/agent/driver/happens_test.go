// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const gpu1 = "gpu-0000-43-00-0"

// node is a machine with one claim that is prepared.
type node struct {
	*machine
	stop  func() error
	train *drapb.Claim
}

// start starts an agent, and returns when the kubelet knows it and it knows its GPUs.
func (n *node) start() {
	n.t.Helper()
	n.stop = n.run("")
	n.register(driver.Name + "-reg.sock")
	eventually(n.t, "the GPUs are found", func() error {
		recorder := httptest.NewRecorder()
		n.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		if body := recorder.Body.String(); !strings.Contains(body, "[+] GPUs found") {
			return errors.New(body)
		}
		return nil
	})
}

// TestWhateverHappens: a claim has been prepared, its pod runs, and then something happens. Whatever it is: the pod's container can restart,
// nobody else gets its GPU, other claims get theirs, and when the pod is gone everything is given back.
func TestWhateverHappens(t *testing.T) {
	t.Parallel()
	restart := func(n *node) {
		n.t.Helper()
		must(n.t, n.stop())
		n.start()
	}
	tests := map[string]struct {
		happens func(n *node)
		// refusal is part of what a second claim for the GPU is told: by default, that the first one holds it.
		refusal string
		// stuck: nobody can prove that the GPU is free, so it stays held, and what is said of it when the pod is gone.
		stuck string
		// late: the GPU cannot be used by another claim afterwards.
		late bool
		// nodes: device nodes are made, which needs root.
		nodes bool
	}{
		"nothing": {happens: func(*node) {}},
		"the kubelet restarts and wipes the slices": {happens: func(n *node) {
			list, err := n.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
			must(n.t, err)
			for _, slice := range list.Items {
				must(n.t, n.client.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{}))
			}
			n.register(driver.Name + "-reg.sock")
		}},
		"the kubelet asks again":    {happens: func(n *node) { must(n.t, errorOf(n.prepare(n.train))) }},
		"the agent is started anew": {happens: restart},
		"the agent crashes and leaves its sockets": {happens: func(n *node) {
			must(n.t, n.stop())
			n.leave("plugins_registry", driver.Name+"-reg.sock")
			n.leave("plugins", driver.Name, "dra.sock")
			n.start()
		}},
		"the agent crashes while it writes the ledger": {happens: func(n *node) {
			must(n.t, n.stop())
			record := n.record()
			must(n.t, os.WriteFile(record+durable.TempSuffix, []byte("torn"), 0o600))
			n.start()
		}},
		"the node reboots": {happens: func(n *node) {
			must(n.t, n.stop())
			n.do(&nvmlsim.Reboot{})
			removeAll(n.t, n.path("cdi")) // a tmpfs
			removeAll(n.t, n.path("dev"))
			n.start()
			eventually(n.t, "the CDI file is back, before any call of the kubelet", func() error { return n.resolve(n.ids()...) })
			must(n.t, errorOf(n.prepare(n.train))) // the pod's new sandbox
		}},
		"the claim is deleted while the agent is down": {happens: func(n *node) {
			must(n.t, n.stop())
			must(n.t, n.client.ResourceV1().ResourceClaims("default").Delete(t.Context(), "train", metav1.DeleteOptions{}))
			n.start()
		}},
		"the driver is loaded anew": {happens: func(n *node) {
			n.do(&nvmlsim.UnloadDriver{})
			n.do(&nvmlsim.LoadDriver{})
			eventually(n.t, "NVML is opened anew", func() error {
				probe := n.allocate(fmt.Sprint("probe-", time.Now().UnixNano()), gpu1)
				return errors.Join(errorOf(n.prepare(probe)), n.unprepare(probe))
			})
		}},
		"the GPU is lost": {happens: func(n *node) { n.do(&nvmlsim.LoseGPU{GPU: "0"}) }, refusal: "GPU_IS_LOST", late: true},
		"the GPU is lost, and the agent is started anew": {happens: func(n *node) {
			n.do(&nvmlsim.LoseGPU{GPU: "0"})
			restart(n)
		}, refusal: "GPU_IS_LOST", late: true},
		"NVML hangs": {happens: func(n *node) {
			n.do(&nvmlsim.HangGPU{GPU: "0"})
			n.t.Cleanup(func() { n.do(&nvmlsim.UnhangGPU{GPU: "0"}) })
		}, refusal: "not answered", late: true},
		"the record is corrupt, with a copy beside it": {happens: func(n *node) {
			must(n.t, errorOf(n.prepare(n.train)))
			must(n.t, n.stop())
			flip(n.t, n.record())
			n.start()
		}},
		"the CDI file is removed": {happens: func(n *node) {
			files, err := filepath.Glob(n.path("cdi", "*"))
			must(n.t, err)
			for _, file := range files {
				must(n.t, os.Remove(file))
			}
		}},
		"the CDI file is overwritten": {happens: func(n *node) {
			files, err := filepath.Glob(n.path("cdi", "*"))
			must(n.t, err)
			for _, file := range files {
				must(n.t, os.WriteFile(file, []byte("{}"), 0o644))
			}
		}},
		"a device node is wrong": {nodes: true, happens: func(n *node) {
			node := n.path("dev", "nvidia0")
			must(n.t, os.Remove(node))
			must(n.t, os.WriteFile(node, nil, 0o600))
			must(n.t, errorOf(n.prepare(n.train))) // the pod's new sandbox
			info, err := os.Lstat(node)
			must(n.t, err)
			if info.Mode()&os.ModeCharDevice == 0 {
				n.t.Errorf("%s is %s after the claim was prepared again", node, info.Mode())
			}
		}},
		"the disk is full, and then not": {happens: func(n *node) {
			n.disk.full.Store(true)
			claim := n.allocate("full", gpu1)
			if err := errorOf(n.prepare(claim)); err == nil || !strings.Contains(err.Error(), "no space left") {
				n.t.Errorf("prepare on a full disk: %v", err)
			}
			must(n.t, errorOf(n.prepare(n.train))) // needs no room
			n.disk.full.Store(false)
			must(n.t, errorOf(n.prepare(claim)))
			must(n.t, n.unprepare(claim))
		}},
		"its pod is deleted by force, and runs on": {happens: func(n *node) {
			n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 4711, Kind: nvmlsim.ProcessCompute, MemoryMiB: 100, Pod: "train-pod-uid"}})
			must(n.t, n.client.ResourceV1().ResourceClaims("default").Delete(t.Context(), "train", metav1.DeleteOptions{}))
			restart(n)
		}},
		"the GPU is allocated twice": {happens: func(n *node) {
			twice := n.allocate("twice", gpu0)
			for range 3 { // the kubelet tries on
				if err := errorOf(n.prepare(twice)); err == nil || !strings.Contains(err.Error(), "held on this node by claim default/train") {
					n.t.Errorf("prepare of the claim that came second: %v", err)
				}
			}
			must(n.t, n.unprepare(twice))
		}},
		"the API server is away, and a pod ends": {happens: func(n *node) {
			ends, begins := n.allocate("ends", gpu1), n.allocate("begins", "gpu-0000-52-00-0")
			must(n.t, errorOf(n.prepare(ends)))
			n.away.Store(true)
			must(n.t, n.unprepare(ends))
			_, err := n.plugin().NodePrepareResources(n.t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{begins}})
			if err == nil || !strings.Contains(err.Error(), "the API server is away") {
				n.t.Errorf("prepare without an API server: %v", err)
			}
			must(n.t, n.resolve(n.ids()...))
			n.away.Store(false)
			must(n.t, errorOf(n.prepare(begins)))
			must(n.t, n.unprepare(begins))
		}},
		"the record is corrupt, and its copy, too": {happens: func(n *node) {
			must(n.t, n.stop())
			files, err := filepath.Glob(n.path("state", "claims", "*"))
			must(n.t, err)
			for _, file := range files {
				flip(n.t, file)
			}
			n.start()
		}, refusal: "cannot be read", stuck: "cannot be read"},
		"the record is truncated": {happens: func(n *node) {
			must(n.t, n.stop())
			files, err := filepath.Glob(n.path("state", "claims", "*"))
			must(n.t, err)
			for _, file := range files {
				must(n.t, os.Truncate(file, 7))
			}
			n.start()
		}, refusal: "cannot be read", stuck: "cannot be read"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := &node{machine: newMachine(t)}
			if n.makeNodes = tc.nodes; tc.nodes && os.Geteuid() != 0 {
				t.Skip("device nodes can only be made by root")
			}
			n.start()
			n.waitForGPUs(8)
			n.train = n.allocate("train", gpu0)
			must(t, errorOf(n.prepare(n.train)))

			tc.happens(n)

			eventually(t, "a container of the pod can restart", func() error { return n.resolve(n.ids()...) })
			refusal := tc.refusal
			if refusal == "" {
				refusal = "held on this node by claim default/train"
			}
			if message := n.prepare(n.allocate("second", gpu0)).GetError(); !strings.Contains(message, refusal) {
				t.Errorf("a second claim for the GPU is told %q, want %q", message, refusal)
			}
			other := n.allocate("other", gpu1)
			must(t, errorOf(n.prepare(other)))
			must(t, n.unprepare(other))
			n.waitForGPUs(8)

			// The pod ends.
			began := time.Now()
			err := n.unprepare(n.train)
			if took := time.Since(began); took > prepare.KubeletPatience {
				t.Errorf("unprepare took %s, and the kubelet waits for %s", took, prepare.KubeletPatience)
			}
			if tc.stuck != "" {
				if err == nil || !strings.Contains(err.Error(), tc.stuck) {
					t.Errorf("unprepare: %v, want an error with %q", err, tc.stuck)
				}
				return
			}
			must(t, err)
			must(t, n.unprepare(n.train)) // the kubelet asks again
			if !tc.late {
				third := n.allocate("third", gpu0)
				must(t, errorOf(n.prepare(third)))
				must(t, n.unprepare(third))
			}
			for _, dir := range []string{n.path("cdi"), n.path("state", "claims")} {
				if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
					t.Errorf("left in %s: %v, %v", dir, left, err)
				}
			}
		})
	}
}

// ids are the CDI devices of the claim "train".
func (m *machine) ids() []string { return []string{cdi.DeviceID("train-uid", "gpu/h100", gpu0)} }

// record is the newest ledger file.
func (m *machine) record() string {
	m.t.Helper()
	files, err := filepath.Glob(m.path("state", "claims", "*.claim"))
	must(m.t, err)
	if len(files) != 1 {
		m.t.Fatalf("ledger files %v, want one", files)
	}
	return files[0]
}

// flip changes one bit in the middle of a file.
func flip(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	data[len(data)/2] ^= 1
	must(t, os.WriteFile(path, data, 0o600))
}

func errorOf(answer *drapb.NodePrepareResourceResponse) error {
	if message := answer.GetError(); message != "" {
		return errors.New(message)
	}
	return nil
}

// fullDisk is a file system without room, while full is set.
type fullDisk struct {
	durable.OS
	full atomic.Bool
	// readOnly is the name of a folder in which nothing can be written.
	readOnly atomic.Pointer[string]
}

func (d *fullDisk) Create(path string, perm fs.FileMode) (durable.File, error) {
	if d.full.Load() {
		return nil, &fs.PathError{Op: "create", Path: path, Err: syscall.ENOSPC}
	}
	if folder := d.readOnly.Load(); folder != nil && filepath.Base(filepath.Dir(path)) == *folder {
		return nil, &fs.PathError{Op: "create", Path: path, Err: syscall.EROFS}
	}
	return d.OS.Create(path, perm)
}
