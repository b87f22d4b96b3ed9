// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newClient(t *testing.T, socket string, services ...string) *Client {
	t.Helper()
	c, err := New(Plugin{Driver: "gpu.example.com", Endpoint: socket, Services: services}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestTheNewestVersionThatBothKnowIsSpoken(t *testing.T) {
	for _, test := range []struct {
		name            string
		services        []string
		service, health string
		err             string
	}{
		{
			name:     "v1 is preferred whatever the order",
			services: []string{"v1beta1.DRAPlugin", "v1.DRAPlugin", "v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"},
			service:  "v1.DRAPlugin", health: "v1.DRAResourceHealth",
		},
		{
			name:     "old versions will do",
			services: []string{"v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"},
			service:  "v1beta1.DRAPlugin", health: "v1alpha1.DRAResourceHealth",
		},
		{name: "health is optional", services: []string{"v1.DRAPlugin"}, service: "v1.DRAPlugin"},
		{name: "health alone is not enough", services: []string{"v1.DRAResourceHealth"}, err: `serves ["v1.DRAResourceHealth"]: want one of`},
		{name: "a plugin without versions is refused", err: "serves []: want one of"},
		{name: "a version from the future is refused", services: []string{"v2.DRAPlugin"}, err: `serves ["v2.DRAPlugin"]: want one of`},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := New(Plugin{Driver: "gpu.example.com", Endpoint: "/dra.sock", Services: test.services}, 0)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("error: got %v, want %q in it", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if diff := cmp.Diff([]string{test.service, test.health}, []string{c.Service(), c.HealthService()}); diff != "" {
				t.Errorf("services (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEveryVersionCarriesEveryCall(t *testing.T) {
	socket := socketPath(t)
	(&fakePlugin{}).serve(t, socket)
	for _, services := range [][]string{
		{"v1.DRAPlugin", "v1.DRAResourceHealth"},
		{"v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"},
	} {
		t.Run(services[0], func(t *testing.T) {
			c := newClient(t, socket, services...)
			prepared, err := c.Prepare(t.Context(), claims("a", "b"))
			if err != nil {
				t.Fatal(err)
			}
			for _, uid := range []string{"a", "b"} {
				device := prepared[uid].GetDevices()[0]
				want := []string{"gpu", "pool", "gpu-0", "vendor/class=" + uid}
				got := append(append(device.RequestNames, device.PoolName, device.DeviceName), device.CdiDeviceIds...)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("device of claim %s (-want +got):\n%s", uid, diff)
				}
			}
			unprepared, err := c.Unprepare(t.Context(), claims("a", "b"))
			if err != nil || len(unprepared) != 2 {
				t.Errorf("Unprepare: got %v, %v", unprepared, err)
			}
			stream, err := c.WatchHealth(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			health, err := stream.Recv()
			if err != nil || len(health.Devices) != 1 || health.Devices[0].Health != healthv1.HealthStatus_HEALTHY {
				t.Errorf("health: got %v, %v", health, err)
			}
		})
	}
}

func TestAnAnswerThatIsNotOnePerClaimIsAnError(t *testing.T) {
	for _, test := range []struct {
		name   string
		answer map[string]*drav1.NodePrepareResourceResponse
		err    string
	}{
		{name: "a claim is left out", answer: map[string]*drav1.NodePrepareResourceResponse{"a": {}}, err: "leaves out claim default/claim-b (b)"},
		{
			name:   "a claim is invented",
			answer: map[string]*drav1.NodePrepareResourceResponse{"a": {}, "b": {}, "c": {}},
			err:    "claim c, which was not asked for",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			socket := socketPath(t)
			plugin := &fakePlugin{answer: func([]*drav1.Claim) map[string]*drav1.NodePrepareResourceResponse { return test.answer }}
			plugin.serve(t, socket)
			_, err := newClient(t, socket, "v1.DRAPlugin").Prepare(t.Context(), claims("a", "b"))
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error: got %v, want %q in it", err, test.err)
			}
		})
	}
}

func TestACallEndsAtItsTimeout(t *testing.T) {
	socket := socketPath(t)
	release := make(chan struct{})
	plugin := &fakePlugin{answer: func([]*drav1.Claim) map[string]*drav1.NodePrepareResourceResponse {
		<-release
		return nil
	}}
	plugin.serve(t, socket)
	defer close(release)
	c, err := New(Plugin{Driver: "gpu.example.com", Endpoint: socket, Services: []string{"v1.DRAPlugin"}}, 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := prepareOne(t.Context(), c); err == nil || !strings.Contains(err.Error(), "DeadlineExceeded") {
		t.Errorf("error: got %v, want DeadlineExceeded", err)
	}
}

func TestCloseIsFinal(t *testing.T) {
	socket := socketPath(t)
	(&fakePlugin{}).serve(t, socket)
	c := newClient(t, socket, "v1.DRAPlugin", "v1.DRAResourceHealth")
	if err := prepareOne(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, prepareErr := c.Prepare(t.Context(), claims("a"))
	_, unprepareErr := c.Unprepare(t.Context(), claims("a"))
	_, healthErr := c.WatchHealth(t.Context())
	for _, err := range []error{prepareErr, unprepareErr, healthErr} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("call on a closed client: got %v, want ErrClosed", err)
		}
	}
}

func TestOneClientServesManyAtOnceAndClosesUnderThem(t *testing.T) {
	socket := socketPath(t)
	plugin := &fakePlugin{}
	plugin.serve(t, socket)
	c := newClient(t, socket, "v1.DRAPlugin", "v1.DRAResourceHealth")
	var callers sync.WaitGroup
	for range 16 {
		callers.Go(func() {
			for {
				if err := prepareOne(context.Background(), c); err != nil {
					if !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					return
				}
			}
		})
	}
	eventually(t, func() error { return prepareOne(t.Context(), c) })
	if n := plugin.connections.Load(); n != 1 {
		t.Errorf("connections of one client: got %d, want 1", n)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	callers.Wait()
}
