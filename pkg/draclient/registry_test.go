// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const driver = "gpu.example.com"

func plugin(socket string) Plugin {
	return Plugin{Driver: driver, Endpoint: socket, Services: []string{"v1.DRAPlugin"}}
}

func newRegistry(t *testing.T) *Registry {
	t.Helper()
	r := &Registry{}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestThePluginRegisteredLastGetsTheCalls(t *testing.T) {
	r := newRegistry(t)
	wantEndpoint := func(want string) {
		t.Helper()
		c, err := r.Get(driver)
		if err != nil || c.Plugin().Endpoint != want {
			t.Errorf("got %v, %v; want endpoint %s", c, err, want)
		}
	}
	for _, endpoint := range []string{"/old.sock", "/new.sock"} {
		if err := r.Register(plugin(endpoint)); err != nil {
			t.Fatal(err)
		}
		wantEndpoint(endpoint)
	}
	if err := r.Deregister(driver, "/new.sock"); err != nil {
		t.Fatal(err)
	}
	wantEndpoint("/old.sock")
	for range 2 {
		if err := r.Deregister(driver, "/old.sock"); err != nil {
			t.Fatal(err)
		}
		if c, err := r.Get(driver); !errors.Is(err, ErrNotRegistered) {
			t.Errorf("got %v, %v; want ErrNotRegistered", c, err)
		}
	}
}

func TestAReplacedClientIsNeverHandedOutAgain(t *testing.T) {
	socket := socketPath(t)
	(&fakePlugin{}).serve(t, socket)
	r := newRegistry(t)
	if err := r.Register(plugin(socket)); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				c, err := r.Get(driver)
				if err != nil {
					t.Error(err)
					return
				}
				// A client that was current when it was asked for may be replaced before the call; then the next one is good.
				if err := prepareOne(context.Background(), c); err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 50 {
		if err := r.Register(plugin(socket)); err != nil {
			t.Fatal(err)
		}
		c, err := r.Get(driver)
		if err != nil {
			t.Fatal(err)
		}
		if err := prepareOne(t.Context(), c); err != nil {
			t.Fatalf("the client after a replacement: %v", err)
		}
	}
	close(done)
	callers.Wait()
}

func TestAClosedRegistryTakesNoPlugin(t *testing.T) {
	r := newRegistry(t)
	if err := r.Register(plugin("/dra.sock")); err != nil {
		t.Fatal(err)
	}
	c, err := r.Get(driver)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Prepare(t.Context(), claims("a")); !errors.Is(err, ErrClosed) {
		t.Errorf("call on a client of a closed registry: got %v, want ErrClosed", err)
	}
	if err := r.Register(plugin("/dra.sock")); !errors.Is(err, ErrClosed) {
		t.Errorf("registration in a closed registry: got %v, want ErrClosed", err)
	}
}

// fakeRegistrar is the plugin's side of registration.
type fakeRegistrar struct {
	registration.UnimplementedRegistrationServer
	info   *registration.PluginInfo
	refuse error
	heard  *registration.RegistrationStatus
}

func (f *fakeRegistrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return f.info, nil
}

func (f *fakeRegistrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	f.heard = s
	return &registration.RegistrationStatusResponse{}, f.refuse
}

func (f *fakeRegistrar) serve(t *testing.T) string {
	t.Helper()
	socket := socketPath(t)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, f)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return socket
}

func TestARegistrarHearsHowItsRegistrationWent(t *testing.T) {
	for _, test := range []struct {
		name       string
		info       *registration.PluginInfo
		refuse     error
		registered bool
		err        string // empty when the plugin is to be registered
	}{
		{
			name:       "a DRA plugin is registered",
			info:       &registration.PluginInfo{Type: registration.DRAPlugin, Name: driver, Endpoint: "/dra.sock", SupportedVersions: []string{"v1.DRAPlugin"}},
			registered: true,
		},
		{
			name: "a device plugin is refused",
			info: &registration.PluginInfo{Type: registration.DevicePlugin, Name: driver, Endpoint: "/dp.sock"},
			err:  `type "DevicePlugin"`,
		},
		{
			name: "a plugin with unknown versions is refused",
			info: &registration.PluginInfo{Type: registration.DRAPlugin, Name: driver, Endpoint: "/dra.sock", SupportedVersions: []string{"v0.DRAPlugin"}},
			err:  `serves ["v0.DRAPlugin"]`,
		},
		{
			name:       "a plugin that does not take yes for an answer is deregistered",
			info:       &registration.PluginInfo{Type: registration.DRAPlugin, Name: driver, Endpoint: "/dra.sock", SupportedVersions: []string{"v1.DRAPlugin"}},
			refuse:     errors.New("shutting down"),
			registered: true,
			err:        "shutting down",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			registrar := &fakeRegistrar{info: test.info, refuse: test.refuse}
			r := newRegistry(t)
			socket := registrar.serve(t)
			asked, kind, err := Ask(t.Context(), socket)
			if err != nil || asked.Endpoint != test.info.Endpoint || kind != test.info.Type || registrar.heard != nil {
				t.Errorf("asked: %+v of type %s, %v; it heard %v, want nothing", asked, kind, err, registrar.heard)
			}
			got, err := r.RegisterFrom(t.Context(), socket)
			if registrar.heard.GetPluginRegistered() != test.registered {
				t.Errorf("the registrar heard %v", registrar.heard)
			}
			_, getErr := r.Get(driver)
			if test.err == "" {
				if err != nil || getErr != nil || got.Endpoint != test.info.Endpoint {
					t.Errorf("got %+v, %v, and then %v", got, err, getErr)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error: got %v, want %q in it", err, test.err)
			}
			if !test.registered && !strings.Contains(registrar.heard.GetError(), test.err) {
				t.Errorf("the registrar heard %q, want %q in it", registrar.heard.GetError(), test.err)
			}
			if !errors.Is(getErr, ErrNotRegistered) {
				t.Errorf("the plugin is registered all the same (%v)", getErr)
			}
		})
	}
}
