// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testCrashAPIServer checks that another process serves afterwards, that it
// knows what the first one stored, and that it accepts the first one's tokens.
func testCrashAPIServer(t *testing.T, c *Cluster) {
	config, err := c.ServiceAccountConfig(t.Context(), "default", "default", nil)
	if err != nil {
		t.Fatal(err)
	}
	namespaces, err := c.AdminClient().CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pid, err := c.plane.pidFile(apiServerName)
	if err != nil {
		t.Fatal(err)
	}
	before := pid.read()
	if err := c.CrashAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := pid.read(); after == before {
		t.Errorf("process %d serves before and after", before)
	}
	again, err := c.AdminClient().CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatalf("after the crash: %v", err)
	}
	if len(again.Items) != len(namespaces.Items) {
		t.Errorf("after the crash there are %d namespaces, before %d", len(again.Items), len(namespaces.Items))
	}
	if _, err := clientFor(t, config).Discovery().ServerVersion(); err != nil {
		t.Errorf("a token of before the crash: %v", err)
	}
}

func testPauseEtcd(t *testing.T, c *Cluster) {
	// A write needs etcd; a read may come from the API server's cache.
	write := func(timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		return c.AdminClient().CoreV1().ConfigMaps("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "none"})
	}
	if err := c.PauseEtcd(); err != nil {
		t.Fatal(err)
	}
	if err := write(2 * time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while etcd is paused a write gives %v, want no answer", err)
	}
	if err := c.ResumeEtcd(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a write to succeed", func() bool { return write(10*time.Second) == nil })
}

func TestNothingCrashesWhatDoesNotRun(t *testing.T) {
	p := &plane{pids: []pidFile{{name: etcdName, path: t.TempDir() + "/none"}, {name: apiServerName, path: t.TempDir() + "/none"}}}
	if err := p.crashAPIServer(t.Context()); !errors.Is(err, errNotRunning) {
		t.Errorf("crashing what does not run gives %v", err)
	}
	p.stopped = true
	if err := p.crashAPIServer(t.Context()); !errors.Is(err, ErrStopped) {
		t.Errorf("crashing what has been stopped gives %v", err)
	}
}
