// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"k8s.io/klog/v2/ktesting"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// laterPlugin is a plugin that registers while the agent serves.
type laterPlugin struct {
	registerapi.UnimplementedRegistrationServer
	name, endpoint, version string // version is empty for a program that is not ours
	broken                  atomic.Bool
	ends                    func() // if not nil, when it is asked
	asked                   atomic.Int32
	socket                  string
	listener                *net.UnixListener
	stop                    func()
}

func (p *laterPlugin) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	p.asked.Add(1)
	if p.ends != nil {
		p.ends()
		return nil, errors.New("ending")
	}
	if p.broken.Load() {
		return nil, errors.New("broken")
	}
	if p.version != "" {
		_ = grpc.SetHeader(ctx, metadata.Pairs(identityHeader, p.version))
	}
	return &registerapi.PluginInfo{Type: registerapi.DRAPlugin, Name: p.name, Endpoint: p.endpoint}, nil
}

// come makes the plugin's registration socket.
func (p *laterPlugin) come(t *testing.T, folder string) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(folder, p.socket)})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	p.listener = listener
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, p)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	p.stop = func() { server.Stop(); <-done }
	t.Cleanup(p.stop)
}

// TestAPluginThatComesLaterIsARival if the kubelet would hand it claims, for as long as it is there.
func TestAPluginThatComesLaterIsARival(t *testing.T) {
	nvidia := func() *laterPlugin { return &laterPlugin{name: Name, socket: Name + "-reg.sock", endpoint: "dra.sock"} }
	other := func() *laterPlugin { return &laterPlugin{name: "nic.example.com", socket: "nic.example.com-reg.sock"} }
	type world struct {
		t        *testing.T
		root     string
		registry string
		plugins  []*laterPlugin
	}
	come := func(w *world) {
		for _, p := range w.plugins {
			p.come(w.t, w.registry)
		}
	}
	remove := func(n int) func(*world) {
		return func(w *world) {
			if err := os.Remove(filepath.Join(w.registry, w.plugins[n].socket)); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	type step struct {
		does func(*world) // nil: only a look
		want string       // in the reason why the agent is not ready; empty if it is
	}
	for name, tc := range map[string]struct {
		plugins []*laterPlugin
		steps   []step
		asked   []int32 // how often each plugin was, if that matters
	}{
		"nobody comes": {steps: []step{{}, {}}},
		"NVIDIA's driver, until its socket is removed": {
			plugins: []*laterPlugin{nvidia()},
			steps:   []step{{}, {come, "another plugin serves driver gpu.nvidia.com"}, {nil, Name + "-reg.sock"}, {remove(0), ""}},
		},
		"NVIDIA's driver, until it is killed": {
			plugins: []*laterPlugin{nvidia()},
			steps:   []step{{come, "another plugin"}, {func(w *world) { w.plugins[0].stop() }, ""}},
		},
		"NVIDIA's driver with a socket of any name, beside a plugin of another driver": {
			plugins: []*laterPlugin{other(), {name: Name, socket: "x.sock"}},
			steps:   []step{{come, "x.sock"}, {nil, "x.sock"}, {remove(1), ""}},
		},
		"NVIDIA's driver, which leaves its checkpoint": {
			plugins: []*laterPlugin{nvidia()},
			steps: []step{
				{come, "another plugin"},
				{func(w *world) {
					if err := os.WriteFile(filepath.Join(w.root, "plugins", Name, nvidiaCheckpoint), []byte("{}"), 0o600); err != nil {
						w.t.Fatal(err)
					}
				}, "another plugin"},
				{remove(0), nvidiaCheckpoint},
				{func(w *world) {
					if err := os.Remove(filepath.Join(w.root, "plugins", Name, nvidiaCheckpoint)); err != nil {
						w.t.Fatal(err)
					}
				}, ""},
			},
		},
		"two rivals, of which one goes": {
			plugins: []*laterPlugin{nvidia(), {name: Name, socket: "x.sock"}},
			steps:   []step{{come, "another plugin"}, {remove(0), "x.sock"}, {remove(1), ""}},
		},
		"a rival that falls silent": {
			plugins: []*laterPlugin{nvidia()},
			steps: []step{
				{come, "another plugin"},
				{func(w *world) { w.plugins[0].broken.Store(true) }, "does not say what it is: "},
				{func(w *world) { w.plugins[0].broken.Store(false) }, "another plugin"},
			},
		},
		"an agent of ours, which does not answer at first, and hangs at its end": {
			plugins: []*laterPlugin{{name: Name, socket: Name + "-u2-reg.sock", version: "v2", endpoint: "plugins/" + Name + "/dra-u2.sock"}},
			steps: []step{
				{func(w *world) { w.plugins[0].broken.Store(true); come(w) }, ""},
				{func(w *world) { w.plugins[0].broken.Store(false) }, ""},
				{func(w *world) { w.plugins[0].broken.Store(true) }, ""},
				{},
			},
		},
		"NVIDIA's driver in a folder of its own, and a socket that the kubelet does not look at": {
			plugins: []*laterPlugin{{name: Name, socket: "nvidia/reg.sock"}, {name: Name, socket: ".x.sock"}},
			steps: []step{
				{func(w *world) {
					if err := os.Mkdir(filepath.Join(w.registry, "nvidia"), 0o700); err != nil {
						w.t.Fatal(err)
					}
					come(w)
				}, "nvidia/reg.sock"},
				{remove(0), ""},
			},
		},
		"NVIDIA's driver in a hidden folder, into which a kubelet that starts looks": {
			plugins: []*laterPlugin{{name: Name, socket: ".nvidia/reg.sock"}},
			steps: []step{{func(w *world) {
				if err := os.Mkdir(filepath.Join(w.registry, ".nvidia"), 0o700); err != nil {
					w.t.Fatal(err)
				}
				come(w)
			}, ".nvidia/reg.sock"}},
		},
		"NVIDIA's driver, where the kubelet's folder is a link": {
			plugins: []*laterPlugin{nvidia()},
			steps: []step{{func(w *world) {
				if err := os.Rename(w.registry, w.registry+"-moved"); err != nil {
					w.t.Fatal(err)
				}
				if err := os.Symlink(w.registry+"-moved", w.registry); err != nil {
					w.t.Fatal(err)
				}
				come(w)
			}, Name + "-reg.sock"}},
		},
		"NVIDIA's driver with a socket of any name, slow to answer": {
			plugins: []*laterPlugin{{name: Name, socket: "x.sock"}},
			steps: []step{
				{func(w *world) { w.plugins[0].broken.Store(true); come(w) }, ""},
				{func(w *world) { w.plugins[0].broken.Store(false) }, "x.sock"},
			},
		},
		"a plugin that names a very long endpoint": {
			plugins: []*laterPlugin{{name: Name, socket: "x.sock", endpoint: strings.Repeat("\x1b\n", 1<<20)}},
			steps:   []step{{come, `\x1b\n`}},
		},
		"an agent of ours that does not belong to a rolling update": {
			plugins: []*laterPlugin{{name: Name, socket: Name + "-reg.sock", version: "v2", endpoint: "plugins/" + Name + "/dra.sock"}},
			steps:   []step{{come, "another stowage node agent (v2)"}},
		},
		"plugins of other drivers, one of them made anew": {
			plugins: []*laterPlugin{other(), {name: "b.example.com", socket: "b-reg.sock"}},
			steps: []step{{come, ""}, {}, {func(w *world) {
				w.plugins[0].stop()
				remove(0)(w)
				w.plugins[0].come(w.t, w.registry)
			}, ""}, {}},
			asked: []int32{2, 1},
		},
		"a socket that was another driver's is made anew by a rival": {
			plugins: []*laterPlugin{other()},
			steps: []step{{come, ""}, {func(w *world) {
				w.plugins[0].stop()
				remove(0)(w)
				w.plugins[0].name = Name
				w.plugins[0].come(w.t, w.registry)
			}, "another plugin"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			a := agentInFolders(t)
			w := &world{t: t, root: a.opts.KubeletRoot, registry: a.registryDir(), plugins: tc.plugins}
			for _, p := range tc.plugins {
				if p.version != "" { // an agent of ours names a whole path
					p.endpoint = filepath.Join(w.root, p.endpoint)
				}
			}
			own := &laterPlugin{name: Name, version: "v1", socket: filepath.Base(a.registrarPath())}
			own.come(t, w.registry)
			watch := &rivalWatch{agent: a}
			for i, s := range tc.steps {
				if s.does != nil {
					s.does(w)
				}
				watch.look(ctx)
				switch p := a.status.notReady(); {
				case s.want == "" && p != nil:
					t.Errorf("step %d: not ready: %+v", i, p)
				case p != nil && (len(p.message) > 2000 || strings.ContainsAny(p.message, "\x1b\n")):
					t.Errorf("step %d: a reason of %d bytes, or with control characters", i, len(p.message))
				case s.want != "" && (p == nil || p.reason != reasonRivalPlugin || !strings.Contains(p.message, s.want)):
					t.Errorf("step %d: %+v, want reason %s with %q", i, p, reasonRivalPlugin, s.want)
				}
			}
			if own.asked.Load() != 0 {
				t.Error("the agent has taken itself for another plugin")
			}
			for i, want := range tc.asked {
				if got := tc.plugins[i].asked.Load(); got != want {
					t.Errorf("plugin %s was asked %d times, want %d", tc.plugins[i].name, got, want)
				}
			}
		})
	}
}

// TestOfSeveralRivalsTheSameIsNamedAtEachLook: the message is in the Node's condition, which is written when it changes.
func TestOfSeveralRivalsTheSameIsNamedAtEachLook(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	a := agentInFolders(t)
	for _, name := range []string{"a", "b", "c", "d"} {
		p := &laterPlugin{name: Name, socket: name + ".sock"}
		p.come(t, a.registryDir())
	}
	watch := &rivalWatch{agent: a}
	watch.look(ctx)
	first := a.status.notReady()
	for range 10 {
		watch.look(ctx)
		if p := a.status.notReady(); !p.same(first) {
			t.Fatalf("%+v, and before %+v", p, first)
		}
	}
}

// TestAnAgentThatEndsWhileItIsAskedIsNoRival: the one that replaces it starts.
func TestAnAgentThatEndsWhileItIsAskedIsNoRival(t *testing.T) {
	for name, remains := range map[string]bool{"and removes its socket": false, "and leaves its socket": true} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			a := agentInFolders(t)
			old := &laterPlugin{name: Name, version: "v0", socket: Name + "-u0-reg.sock"}
			old.come(t, a.registryDir())
			old.ends = func() {
				_ = old.listener.Close()
				if !remains {
					_ = os.Remove(filepath.Join(a.registryDir(), old.socket))
				}
			}
			if err := a.checkRivals(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// agentInFolders returns an agent that is ready, as far as is needed to look for rivals.
func agentInFolders(t *testing.T) *Agent {
	t.Helper()
	root, err := os.MkdirTemp("", "rivals") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	a := &Agent{opts: Options{KubeletRoot: root, PodUID: "u1"}, status: newStatus()}
	a.check = &selfCheck{status: a.status, registrar: &socket{path: a.registrarPath()}}
	for _, folder := range []string{a.registryDir(), a.pluginDir()} {
		if err := os.MkdirAll(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, st := range []stage{stageLedger, stageFolders, stageServing, stageRegistered} {
		a.status.set(st, true)
	}
	return a
}
