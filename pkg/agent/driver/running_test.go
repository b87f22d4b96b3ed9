// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/sharing"
)

// TestWhichPodsRunIsKnownWhereTheKubeletIsSeen: in a process table without the kubelet its pods are missing, too.
func TestWhichPodsRunIsKnownWhereTheKubeletIsSeen(t *testing.T) {
	root, err := os.MkdirTemp("", "kubelet") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	pods := map[types.UID]bool{"pod-uid": true}
	a := &Agent{opts: Options{KubeletRoot: root}}
	if a.running() != nil {
		t.Error("it is asked for where containers have no real GPUs")
	}
	a.opts.Tools = sharing.Tools{Pods: func() (map[types.UID]bool, error) { return pods, nil }}
	if got, err := a.running()(t.Context()); err == nil {
		t.Errorf("without a kubelet: %v", got)
	}
	if err := os.Mkdir(filepath.Dir(a.podResources()), 0o755); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", a.podResources())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if got, err := a.running()(t.Context()); err != nil || !maps.Equal(got, pods) {
		t.Errorf("with one: %v, %v", got, err)
	}
}

// TestAKubeletThatHangsIsNotWaitedForWithoutEnd: it takes no connections any more.
func TestAKubeletThatHangsIsNotWaitedForWithoutEnd(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	<-ctx.Done()
	if err := seesPeer(ctx, filepath.Join(t.TempDir(), "kubelet.sock")); err == nil || !strings.Contains(err.Error(), "timeout") && !strings.Contains(err.Error(), "deadline") {
		t.Errorf("%v, want that the time is over", err)
	}
}
