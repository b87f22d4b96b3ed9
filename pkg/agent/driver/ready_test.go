// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/driver"
)

// readyz asks the agent that was started last.
func (m *machine) readyz() (code int, body string) {
	m.t.Helper()
	recorder := httptest.NewRecorder()
	m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	return recorder.Code, recorder.Body.String()
}

// waitReadyz waits for an answer with the code that says all that is wanted.
func (m *machine) waitReadyz(code int, want ...string) {
	m.t.Helper()
	eventually(m.t, fmt.Sprintf("readyz is %d and says %q", code, want), func() error {
		got, body := m.readyz()
		if got != code {
			return fmt.Errorf("%d: %s", got, body)
		}
		for _, text := range want {
			if !strings.Contains(body, text) {
				return errors.New(body)
			}
		}
		return nil
	})
}

// waitNotReadyTaint waits until each device has the taint with the value, or has none if that is empty.
func (m *machine) waitNotReadyTaint(value string) {
	m.t.Helper()
	eventually(m.t, fmt.Sprintf("the taint of all devices is %q", value), func() error {
		list, err := m.client.ResourceV1().ResourceSlices().List(m.t.Context(), metav1.ListOptions{})
		must(m.t, err)
		for _, slice := range list.Items {
			for _, device := range slice.Spec.Devices {
				got := ""
				for _, taint := range device.Taints {
					if taint.Key == "gpu.nvidia.com/not-ready" {
						got = taint.Value
					}
				}
				if got != value {
					return fmt.Errorf("device %s: %q", device.Name, got)
				}
			}
		}
		return nil
	})
}

// TestReadyMeansItWorks: what the kubelet and prepare need goes while the agent runs, and comes back.
func TestReadyMeansItWorks(t *testing.T) {
	t.Parallel()
	const ours = driver.Name + "-reg.sock"
	tests := map[string]struct {
		// happens breaks something, and returns what mends it; nil if the agent does that itself.
		happens func(m *machine) (mend func())
		// reason is that of the taint while it is broken, and says is part of readyz; empty if the agent mends it by itself.
		reason, says string
		// registers: the kubelet finds a new registration socket afterwards.
		registers bool
	}{
		"the registration socket is removed": {
			happens:   func(m *machine) func() { must(m.t, os.Remove(m.path("plugins_registry", ours))); return nil },
			registers: true,
		},
		"the kubelet's folder of sockets is removed": {
			happens: func(m *machine) func() {
				removeAll(m.t, m.path("plugins_registry"))
				return func() { must(m.t, os.Mkdir(m.path("plugins_registry"), 0o755)) }
			},
			reason: "SocketMissing", says: "[-] serving the kubelet: the socket ",
			registers: true,
		},
		"the endpoint's socket is removed": {
			happens: func(m *machine) func() {
				must(m.t, os.Remove(m.path("plugins", driver.Name, "dra.sock")))
				return nil
			},
		},
		"another process takes the registration socket": {
			happens: func(m *machine) func() {
				return m.takeOver("plugins_registry", ours)
			},
			reason: "SocketTaken", says: "is served by another process",
			registers: true,
		},
		"another process takes the endpoint's socket": {
			happens: func(m *machine) func() {
				return m.takeOver("plugins", driver.Name, "dra.sock")
			},
			reason: "SocketTaken", says: "is served by another process",
		},
		"a process takes the registration socket and crashes": {
			happens: func(m *machine) func() {
				must(m.t, os.Remove(m.path("plugins_registry", ours)))
				m.leave("plugins_registry", ours)
				return nil
			},
			registers: true,
		},
		"the state folder is full": {
			happens: func(m *machine) func() {
				m.disk.full.Store(true)
				m.failPrepare()
				return func() { m.disk.full.Store(false) }
			},
			reason: "FolderFull", says: "is full",
		},
		"the ledger's folder alone is read-only": {
			happens: func(m *machine) func() {
				claims := "claims"
				m.disk.readOnly.Store(&claims)
				m.failPrepare()
				return func() { m.disk.readOnly.Store(nil) }
			},
			reason: "FolderReadOnly", says: "state/claims is read-only",
		},
		"the ledger cannot be read": {
			happens: func(m *machine) func() {
				must(m.t, os.Rename(m.path("state", "claims"), m.path("state", "away")))
				m.failPrepare()
				return func() { must(m.t, os.Rename(m.path("state", "away"), m.path("state", "claims"))) }
			},
			reason: "LedgerUnreadable", says: "[-] ledger read: ",
		},
		"the CDI folder is removed": {
			happens: func(m *machine) func() { m.removedAndMade(m.path("cdi")); return nil },
		},
		"the folder of locks is removed": {
			happens: func(m *machine) func() { m.removedAndMade(m.path("state", "locks")); return nil },
		},
		"the folder of quarantines is removed": {
			happens: func(m *machine) func() {
				must(m.t, os.Rename(m.path("state", "quarantine"), m.path("state", "away")))
				m.last.LookAtFolders()
				return func() { must(m.t, os.Rename(m.path("state", "away"), m.path("state", "quarantine"))) }
			},
			reason: "FolderNotWritable", says: "state/quarantine cannot be written",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			m.run("")
			m.register(ours)
			m.waitForGPUs(8)
			m.waitReadyz(http.StatusOK)
			mend := tc.happens(m)
			if tc.reason != "" {
				m.waitReadyz(http.StatusServiceUnavailable, tc.says)
				m.waitNotReadyTaint(tc.reason)
				m.waitNodeCondition("False", tc.reason)
				m.waitNodeEvent("Warning", "CannotPrepareClaims")
			}
			if mend != nil {
				mend()
			}
			if tc.registers {
				m.waitReadyz(http.StatusServiceUnavailable, "[+] serving the kubelet", "[-] registered by the kubelet")
				m.register(ours)
			}
			m.waitReadyz(http.StatusOK)
			m.waitNotReadyTaint("")
			m.waitNodeCondition("True", "AllGPUsReady")
			if answer := m.prepare(m.allocate("after", gpu0)); answer.GetError() != "" {
				t.Errorf("prepare afterwards: %s", answer.GetError())
			}
		})
	}
}

// notReady is a backend that lacks what containers need.
type notReady struct {
	cdi.Backend
	failed atomic.Bool
}

func (b *notReady) Ready(context.Context) error {
	if b.failed.Load() {
		return errors.New("no room for the hook")
	}
	return nil
}

// TestAnAgentStartsWhereNothingCanBeWritten, says so on the Node, and is ready once it can.
func TestAnAgentStartsWhereNothingCanBeWritten(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		// breaks the state folder before the start, and returns what mends it.
		breaks func(m *machine) (mend func())
		reason string
		// says what is wrong, if it is not the state folder.
		says string
		// taint: an agent before has left what is needed to publish.
		taint bool
	}{
		"the state folder cannot be made": {
			breaks: func(m *machine) func() {
				must(m.t, os.WriteFile(m.path("state"), nil, 0o600))
				return func() { must(m.t, os.Remove(m.path("state"))) }
			},
			reason: "FolderNotWritable",
		},
		"the disk is full": {
			breaks: func(m *machine) func() {
				m.disk.full.Store(true)
				return func() { m.disk.full.Store(false) }
			},
			reason: "FolderFull", taint: true,
		},
		"the state folder has become read-only": {
			breaks: func(m *machine) func() {
				mount := func(flags uintptr) { must(m.t, unix.Mount("none", m.path("state"), "tmpfs", flags, "")) }
				must(m.t, os.Mkdir(m.path("state"), 0o700))
				if err := unix.Mount("none", m.path("state"), "tmpfs", 0, ""); errors.Is(err, unix.EPERM) {
					m.t.Skip("only root can mount")
				}
				m.t.Cleanup(func() { must(m.t, unix.Unmount(m.path("state"), unix.MNT_DETACH)) })
				stop := m.run("")
				m.waitForGPUs(8)
				must(m.t, stop())
				mount(unix.MS_REMOUNT | unix.MS_RDONLY)
				return func() { mount(unix.MS_REMOUNT) }
			},
			reason: "FolderReadOnly", taint: true,
		},
		"there is no program to prepare containers with": {
			breaks: func(m *machine) func() {
				backend := &notReady{}
				backend.failed.Store(true)
				m.adjust = func(opts *driver.Options) {
					backend.Backend = opts.Backend
					opts.Backend = backend
				}
				return func() { backend.failed.Store(false) }
			},
			reason: "ProgramMissing", says: "containers cannot be prepared: no room for the hook", taint: true,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			mend := tc.breaks(m)
			before := len(m.client.Actions())
			m.run("")
			m.register(driver.Name + "-reg.sock")
			m.waitReadyz(http.StatusServiceUnavailable, "[-] folders writable: "+cmp.Or(tc.says, "the folder "+m.path("state")))
			m.waitNodeEvent("Warning", "CannotPrepareClaims")
			m.waitNodeCondition("False", tc.reason)
			if tc.taint {
				m.waitForGPUs(8)
				m.waitNotReadyTaint(tc.reason)
				m.checkAllWrittenWithTaint(before, "gpu.nvidia.com/not-ready", tc.reason)
			}
			mend()
			m.waitReadyz(http.StatusOK)
			m.waitForGPUs(8)
			m.waitNotReadyTaint("")
			m.waitNodeCondition("True", "AllGPUsReady")
			must(t, errorOf(m.prepare(m.allocate("after", gpu0))))
		})
	}
}

// checkAllWrittenWithTaint checks all writes of slices after the first n calls of the API server.
func (m *machine) checkAllWrittenWithTaint(n int, key, value string) {
	m.t.Helper()
	for _, action := range m.client.Actions()[n:] {
		write, ok := action.(clienttesting.CreateAction) // updates have the same methods
		if !ok || action.GetResource().Resource != "resourceslices" {
			continue
		}
		for _, device := range write.GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
			if !slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == key && t.Value == value }) {
				m.t.Errorf("%s of device %s: taints %v, want %s=%s", action.GetVerb(), device.Name, device.Taints, key, value)
			}
		}
	}
}

// failPrepare lets the agent find out at once that it cannot prepare.
func (m *machine) failPrepare() {
	m.t.Helper()
	if answer := m.prepare(m.allocate("fails", gpu0)); answer.GetError() == "" {
		m.t.Error("a claim was prepared")
	}
}

// removedAndMade removes a folder, and waits until it is there again.
func (m *machine) removedAndMade(path string) {
	m.t.Helper()
	removeAll(m.t, path)
	m.last.LookAtFolders()
	eventually(m.t, path+" is made anew", func() error {
		_, err := os.Stat(path)
		return err
	})
}

// takeOver puts a socket that is not the agent's in the place of one that is.
func (m *machine) takeOver(parts ...string) (giveBack func()) {
	m.t.Helper()
	must(m.t, os.Remove(m.path(parts...)))
	listener, err := net.Listen("unix", m.path(parts...))
	must(m.t, err)
	return func() { must(m.t, listener.Close()) }
}

// waitNodeCondition waits until the Node has the condition.
func (m *machine) waitNodeCondition(status corev1.ConditionStatus, reason string) {
	m.t.Helper()
	eventually(m.t, fmt.Sprintf("the Node says GPUsReady=%s:%s", status, reason), func() error {
		node, err := m.client.CoreV1().Nodes().Get(m.t.Context(), nodeName, metav1.GetOptions{})
		must(m.t, err)
		for _, c := range node.Status.Conditions {
			if c.Type == "GPUsReady" && c.Status == status && c.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("conditions %v", node.Status.Conditions)
	})
}

// waitNodeEvent waits until there is an event of the Node, as kubectl describe looks for it.
func (m *machine) waitNodeEvent(kind, reason string) {
	m.t.Helper()
	eventually(m.t, "the Node has an event "+reason, func() error {
		list, err := m.client.CoreV1().Events("default").List(m.t.Context(), metav1.ListOptions{})
		must(m.t, err)
		for _, e := range list.Items {
			if of := e.InvolvedObject; e.Type == kind && e.Reason == reason && of.Kind == "Node" && of.Name == nodeName && of.UID == nodeName && of.Namespace == "" {
				return nil
			}
		}
		return fmt.Errorf("there are %d others", len(list.Items))
	})
}

// TestAWarningAboutTheHostIsTold, by an event and by the condition, and the node is ready all the same.
func TestAWarningAboutTheHostIsTold(t *testing.T) {
	m := newMachine(t)
	m.adjust = func(opts *driver.Options) { opts.Warning = func() string { return "pods get GPUs in another way" } }
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	m.waitNodeEvent(corev1.EventTypeWarning, "HostConfiguration")
	m.waitNodeCondition(corev1.ConditionTrue, "AllGPUsReady")
	node, err := m.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	must(t, err)
	if got, want := node.Status.Conditions[0].Message, "8 of 8 GPUs can be used; pods get GPUs in another way"; got != want {
		t.Errorf("condition %q, want %q", got, want)
	}
}

// TestASecondAgentWithTheSameIdentityIsRefused: it would take the sockets of the first, and remove them when it ends.
func TestASecondAgentWithTheSameIdentityIsRefused(t *testing.T) {
	m := newMachine(t)
	m.run("pod-1")
	m.register(driver.Name + "-pod-1-reg.sock")
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // if it were not refused
	defer cancel()
	second, err := m.agent(ctx, "pod-1")
	must(t, err)
	err = second.Run(ctx)
	want := fmt.Sprintf("another stowage node agent (v-test) already serves driver gpu.nvidia.com on this node with the same --pod-uid, "+
		"by the registration socket %s: stop it first, or give each agent a --pod-uid of its own", m.path("plugins_registry", driver.Name+"-pod-1-reg.sock"))
	var rival *driver.RivalError
	if !errors.As(err, &rival) || err.Error() != want {
		t.Errorf("Run: %v\nwant %s", err, want)
	}
	m.waitReadyz(http.StatusOK)
}
