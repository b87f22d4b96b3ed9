// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/podresources"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const driverName = "gpu.nvidia.com"

// rig is a simulated node with an exporter. Its fields are set between scrapes.
type rig struct {
	t       *testing.T
	handle  *nvml.Handle
	node    *discovery.Node
	pods    []podresources.Pod
	offers  []podresources.Devices
	away    error         // of the kubelet
	hangs   chan struct{} // the kubelet does not answer until it is closed
	records []*ledger.Record
	ill     error // of the ledger's disk
	reads   atomic.Int32
	users   atomic.Int32 // of the session
	gone    error        // of the session

	exporter *Exporter
}

// newRig has the first GPUs of a machine.
func newRig(t *testing.T, profile string, gpus int) *rig {
	t.Helper()
	handle, err := nvml.Open("sim:"+profile, nvml.OpenOptions{NodeName: "node-1", ProcRoot: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if err := handle.Init(); err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, handle: handle}
	r.discover()
	r.node.GPUs = r.node.GPUs[:gpus]
	r.exporter = New(Options{NodeName: "node-1", Driver: driverName, GPUs: r, Kubelet: r, Claims: r.claims, Clock: clock.RealClock{}})
	t.Cleanup(func() { _ = handle.Shutdown() })
	return r
}

// discover looks at the machine anew.
func (r *rig) discover() {
	r.t.Helper()
	node, err := discovery.Discover(r.t.Context(), r.handle, r.handle.Sysfs)
	if err != nil {
		r.t.Fatal(err)
	}
	r.node = node
}

func (r *rig) Node() *discovery.Node { return r.node }

func (r *rig) Read(_ context.Context, gpu *discovery.GPU, f func(nvml.Device) error) error {
	r.reads.Add(1)
	if r.gone != nil {
		return r.gone
	}
	r.users.Add(1)
	defer r.users.Add(-1)
	d, err := r.handle.DeviceAt(gpu.PCIBusID)
	if err != nil {
		return err
	}
	return f(d)
}

func (r *rig) List(context.Context) ([]podresources.Pod, error) {
	if r.hangs != nil {
		<-r.hangs
	}
	return r.pods, r.away
}

func (r *rig) Allocatable(context.Context) ([]podresources.Devices, error) { return r.offers, r.away }

func (r *rig) claims() ([]*ledger.Record, error) { return r.records, r.ill }

// do runs a command on the machine.
func (r *rig) do(c nvmlsim.Command) nvmlsim.Result {
	r.t.Helper()
	result, err := r.handle.Machine.Do(c)
	if err != nil {
		r.t.Fatal(err)
	}
	return result
}

// gpu is the name of a GPU's device.
func (r *rig) gpu(i int) string { return r.node.GPUs[i].Name }

// prepared adds a claim with one device to the ledger, and returns it as the kubelet tells of it.
func (r *rig) prepared(name string, device ledger.Device) podresources.Claim {
	device.Request, device.Pool = "r", "node-1"
	share := ""
	if device.ShareID != nil {
		share = string(*device.ShareID)
	}
	device.CDIDeviceIDs = []string{"k8s.gpu.nvidia.com/claim=uid-" + name + "_r_" + device.Device + share}
	r.records = append(r.records, &ledger.Record{UID: types.UID("uid-" + name), Entry: &ledger.Entry{
		Claim: ledger.Claim{UID: types.UID("uid-" + name), Namespace: "team-a", Name: name}, State: ledger.PrepareCompleted, Devices: []ledger.Device{device},
	}})
	return podresources.Claim{Namespace: "team-a", Name: name, CDI: device.CDIDeviceIDs, Devices: []podresources.ClaimDevice{
		{Driver: driverName, Pool: "node-1", Device: device.Device, Share: share},
	}}
}

// released takes the claim from the ledger.
func (r *rig) released(name string) {
	r.records = slices.DeleteFunc(r.records, func(record *ledger.Record) bool { return record.Entry != nil && record.Entry.Claim.Name == name })
}

// runs adds a pod whose containers have the claim.
func (r *rig) runs(pod string, claim podresources.Claim, containers ...string) {
	p := podresources.Pod{Namespace: claim.Namespace, Name: pod}
	for _, container := range containers {
		p.Containers = append(p.Containers, podresources.Container{Name: container, Claims: []podresources.Claim{claim}})
	}
	r.pods = append(r.pods, p)
}

// plugged adds a pod with devices of a device plugin.
func (r *rig) plugged(pod, resource string, ids ...string) {
	r.pods = append(r.pods, podresources.Pod{Namespace: "team-b", Name: pod, Containers: []podresources.Container{
		{Name: "main", Devices: []podresources.Devices{{Resource: resource, IDs: ids}}},
	}})
}

// scrape returns the metrics without their help.
func (r *rig) scrape() string {
	r.t.Helper()
	answer := httptest.NewRecorder()
	r.exporter.ServeHTTP(answer, httptest.NewRequestWithContext(r.t.Context(), http.MethodGet, "/metrics/gpus", nil))
	if answer.Code != http.StatusOK {
		r.t.Fatalf("%d: %s", answer.Code, answer.Body)
	}
	seen := map[string]bool{}
	for _, s := range r.exporter.series() {
		// Prometheus takes none of two.
		key := s.desc.name + fmt.Sprintf("%q", s.labels)
		if seen[key] {
			r.t.Errorf("%s is there twice", key)
		}
		seen[key] = true
	}
	return regexp.MustCompile(`(?m)^# HELP .*\n`).ReplaceAllString(answer.Body.String(), "")
}

// found are the series of a metric whose labels have all of these, such as `pod="p"`, as their values by the labels that are asked for.
func found(text, metric string, with ...string) []string {
	var series []string
	for line := range strings.Lines(text) {
		labels, isOf := strings.CutPrefix(line, metric+"{")
		if !isOf || slices.ContainsFunc(with, func(label string) bool { return !strings.Contains(labels, label) }) {
			continue
		}
		series = append(series, strings.TrimSpace(labels[strings.LastIndex(labels, "} ")+2:]))
	}
	return series
}

// expect compares the values of a metric's series that have these labels.
func (r *rig) expect(when, text, metric string, values []string, with ...string) {
	r.t.Helper()
	if got := found(text, metric, with...); !slices.Equal(got, values) {
		r.t.Errorf("%s: %s with %q is %q, want %q", when, metric, with, got, values)
	}
}

var errAway = errors.New("connection refused")

func ptr[T any](v T) *T { return &v }

func golden(t *testing.T, file, got string, update bool) {
	t.Helper()
	if update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		for i, line := range strings.Split(got, "\n") {
			if lines := strings.Split(string(want), "\n"); i >= len(lines) || lines[i] != line {
				t.Fatalf("%s, line %d is now\n%s\n(-update rewrites it)", file, i+1, line)
			}
		}
		t.Fatalf("%s has more lines than are told", file)
	}
}
