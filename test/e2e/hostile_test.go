// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
)

var hostileFor = flag.Duration("hostile-for", 20*time.Second, "how long a tenant's pod fills, nests and forks")

// shmBytes is what the agent gives a daemon by default.
const shmBytes = 64 << 20

// TestAHostilePodWithMPS: a tenant's container does to its daemon's folder, and to the node, what root of a container can: it takes all bytes and
// files, nests folders deeper than any path, makes links that lead to the host, and has as many processes as it gets. The pods of others come and
// go meanwhile, one of them with MPS, and what the tenant leaves is taken away with its claim.
func TestAHostilePodWithMPS(t *testing.T) {
	const name = "mps"
	mpsRoot := filepath.Join(t.TempDir(), "mps")
	// To mount takes more rights than the agents of the other tests have.
	n, err := node.Start(t.Context(), cluster.Cluster, node.Options{Name: name, Agent: node.Agent{
		Binary: unconfinedAgent, NVML: profile, Args: []string{"--sim-mps-folders", "--mps-root=" + mpsRoot, lockTimeout},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.WaitForSlices(t.Context(), name, gpuCount); err != nil {
		t.Fatal(err)
	}
	// The node's mounts are in a namespace of their own: seen from here, nothing may ever be in the folder that the tmpfs are mounted over.
	inside := filepath.Join("/proc", strconv.Itoa(n.Agent().Pid()), "root", mpsRoot)

	victims, tenants := newNamespace(t), newNamespace(t)
	createMPSTemplate(t, tenants)
	createMPSTemplate(t, victims)
	onNode := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: name} }

	hostile := podWithClaim("hostile", "mps")
	onNode(hostile)
	hostile.Spec.Containers[0].Args = []string{"hostile", hostileFor.String()}
	hostile.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m"), corev1.ResourceMemory: resource.MustParse("512Mi")}
	create(t, tenants, hostile)
	bad := pod{t: t, namespace: tenants, name: hostile.Name}
	bad.waitRunning()
	daemons := daemonFolders(t, inside)
	if len(daemons) != 1 {
		t.Fatalf("daemons' folders: %v, want one", daemons)
	}
	theirs := filepath.Join(inside, daemons[0])

	// Two others come and go, again and again.
	var done *report.Hostile
	rounds, slowest := 0, time.Duration(0)
	for begin := time.Now(); done == nil || rounds < 2; rounds++ {
		if time.Since(begin) > *hostileFor+podTimeout {
			t.Fatal("the hostile container does not come to an end")
		}
		before := time.Now()
		withMPS, without := podWithClaim(fmt.Sprint("mps-", rounds), "mps"), podWithClaim(fmt.Sprint("plain-", rounds), "plain")
		for _, p := range []*corev1.Pod{withMPS, without} {
			onNode(p)
			create(t, victims, p)
		}
		for _, p := range []*corev1.Pod{withMPS, without} {
			(pod{t: t, namespace: victims, name: p.Name}).waitRunning()
		}
		slowest = max(slowest, time.Since(before))
		for _, other := range daemonFolders(t, inside) {
			if other == daemons[0] {
				continue
			}
			if err := os.WriteFile(filepath.Join(inside, other, "shm", "x"), make([]byte, shmBytes/2), 0o600); err != nil {
				t.Errorf("round %d: the room of another daemon: %v", rounds, err)
			}
		}
		for _, p := range []*corev1.Pod{withMPS, without} {
			(pod{t: t, namespace: victims, name: p.Name}).delete()
		}
		if restarts := bad.container().RestartCount; restarts > 0 {
			t.Fatalf("the hostile container was ended and started again %d times: %s", restarts, bad.log())
		}
		done = lastHostile(t, bad.log())
	}
	t.Logf("the container: %+v", *done)
	t.Logf("meanwhile %d rounds of two other pods ran, the slowest after %s", rounds, slowest.Round(10*time.Millisecond))
	if !done.OneFileSystem || done.Unbounded != "" || done.Failed != "" {
		t.Errorf("one tmpfs: %t; without an end: %q; failed: %q", done.OneFileSystem, done.Unbounded, done.Failed)
	}
	if done.Rounds < 2 || done.Forks < 2 || done.Bytes < shmBytes/2 || done.Bytes > shmBytes || done.Files < 1000 || done.Levels < 1000 || done.Processes < 100 || done.Processes > 512 {
		t.Errorf("it has tried too little, or could do too much: %+v", *done)
	}

	// It is full, and so deep that nobody can walk it. What the host has of it follows no link.
	var stat unix.Statfs_t
	if err := unix.Statfs(theirs, &stat); err != nil {
		t.Fatal(err)
	}
	if stat.Type != unix.TMPFS_MAGIC || stat.Ffree != 0 || stat.Bfree != 0 || int64(stat.Blocks)*stat.Bsize != shmBytes {
		t.Errorf("the daemon's folder: type %x, %d blocks of %d, %d free, %d files free; want a full tmpfs of %d bytes", stat.Type, stat.Blocks, stat.Bsize, stat.Bfree, stat.Ffree, shmBytes)
	}
	for _, link := range []string{"shm/root", "shm/up", "pipe/log", "pipe/control"} {
		if _, err := os.Stat(filepath.Join(theirs, link)); !errors.Is(err, unix.ELOOP) {
			t.Errorf("link %s: %v, want that it is not followed", link, err)
		}
	}

	begin := time.Now()
	bad.delete()
	poll(t, "the claim is gone", func(context.Context) error {
		if claims := len(allClaims(t, tenants)) + len(allClaims(t, victims)); claims > 0 {
			return fmt.Errorf("there are %d", claims)
		}
		return nil
	})
	t.Logf("its claim is gone %s after the pod was deleted", since(begin))
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("it took %s: the kubelet had to call again", took)
	}
	if left := daemonFolders(t, inside); len(left) > 0 {
		t.Errorf("folders are left: %v", left)
	}
	mounts, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(n.Agent().Pid()), "mountinfo"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(mounts) {
		if bytes.Contains(line, []byte(mpsRoot)) {
			t.Errorf("it is mounted still: %s", line)
		}
	}
	if err := filepath.WalkDir(mpsRoot, func(path string, _ fs.DirEntry, err error) error {
		if path != mpsRoot {
			t.Errorf("on the node's disk there is %s", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	for _, pattern := range []string{"quarantine/*", "claims/*", "metadata/*/*"} {
		if left, err := filepath.Glob(filepath.Join(n.StateDir(), pattern)); err != nil || len(left) > 0 {
			t.Errorf("left in the state folder: %v, %v", left, err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(n.CDIDir(), "*")); err != nil || len(left) > 0 {
		t.Errorf("left CDI specs: %v, %v", left, err)
	}
	slices, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + name})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range slices.Items {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) > 0 {
				t.Errorf("device %s has taints: %+v", d.Name, d.Taints)
			}
		}
	}
	// All GPUs can be had.
	createPod(t, victims, "all", gpuCount, onNode)
	(pod{t: t, namespace: victims, name: "all"}).waitRunning()
	(pod{t: t, namespace: victims, name: "all"}).delete()
}

func create(t *testing.T, namespace string, p *corev1.Pod) {
	t.Helper()
	if _, err := cluster.AdminClient().CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// createMPSTemplate makes templates of claims for one GPU: mps, and plain without.
func createMPSTemplate(t *testing.T, namespace string) {
	t.Helper()
	for name, config := range map[string][]resourceapi.DeviceClaimConfiguration{
		"plain": nil,
		"mps": {{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver:     "gpu.nvidia.com",
			Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`)},
		}}}},
	} {
		if _, err := cluster.AdminClient().ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}},
				Config:   config,
			}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// daemonFolders are the names of what is in the folder of the daemons.
func daemonFolders(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// lastHostile is what the container printed at its end, nil before that.
func lastHostile(t *testing.T, log string) *report.Hostile {
	t.Helper()
	for line := range strings.Lines(log) {
		var r report.Hostile
		if json.Unmarshal([]byte(line), &r) == nil && r.Hostile {
			return &r
		}
	}
	return nil
}
