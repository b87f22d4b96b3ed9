// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// processesOf lists the processes that name a folder in their command line.
// Children that wait to be reaped have no command line any more.
func processesOf(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(data), dir) {
			program, _, _ := strings.Cut(string(data), "\x00")
			found = append(found, filepath.Base(program))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func skipIfShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts a control plane")
	}
}

func clientFor(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestControlPlane(t *testing.T) {
	skipIfShort(t)
	c, err := Start(t.Context(), Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	dir := c.Dir()
	want := []string{"etcd", "kube-apiserver", "kube-controller-manager"}
	if got := processesOf(t, dir); !slices.Equal(got, want) {
		t.Errorf("running are %v, want %v", got, want)
	}

	t.Run("an identity without rights is forbidden everything", func(t *testing.T) { testForbidden(t, c) })
	t.Run("a node may write its own status only", func(t *testing.T) { testNodeRestriction(t, c) })
	t.Run("a bound token carries its node", func(t *testing.T) { testBoundToken(t, c) })
	t.Run("components find all that they authenticate clients with", func(t *testing.T) { testAuthentication(t, c) })
	t.Run("a claim is made from a template", func(t *testing.T) { testClaimFromTemplate(t, c) })
	t.Run("manifests are applied and deleted", func(t *testing.T) { testApply(t, c) })
	t.Run("a bad manifest is refused with kubectl's message", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "bad.yaml")
		writeTestFile(t, file, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nunknown: 1\n")
		if err := c.Apply(t.Context(), file); err == nil || !strings.Contains(err.Error(), ".unknown") {
			t.Errorf("got error %v, want it to name the field", err)
		}
	})
	t.Run("the stock scheduler binds a pod", func(t *testing.T) { testStockScheduler(t, c) })
	t.Run("a crashed kube-apiserver comes back with its keys", func(t *testing.T) { testCrashAPIServer(t, c) })
	t.Run("a paused etcd answers when it is resumed", func(t *testing.T) { testPauseEtcd(t, c) })
	t.Run("a scheduler that refuses its configuration says why", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "config.yaml")
		writeTestFile(t, file, "unknownField: 1\n")
		_, err := c.StartStockScheduler(t.Context(), SchedulerOptions{Name: "refused", Config: file})
		var exit *ExitError
		if !errors.As(err, &exit) || !strings.Contains(exit.LogTail, "unknownField") {
			t.Errorf("got error %v, want an ExitError that names the field", err)
		}
	})

	if err := c.Stop(); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if got := processesOf(t, dir); len(got) > 0 {
		t.Errorf("after Stop %v still run", got)
	}
	if pathExists(dir) {
		t.Errorf("after Stop %s still exists", dir)
	}
}

func testForbidden(t *testing.T, c *Cluster) {
	config, err := c.ServiceAccountConfig(t.Context(), "default", "default", nil)
	if err != nil {
		t.Fatal(err)
	}
	client := clientFor(t, config)
	if _, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("listing pods gives %v, want forbidden", err)
	}
	if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("listing resource slices gives %v, want forbidden", err)
	}
}

func testNodeRestriction(t *testing.T, c *Cluster) {
	config, err := c.NodeConfig("own")
	if err != nil {
		t.Fatal(err)
	}
	nodes := clientFor(t, config).CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "own"}}, metav1.CreateOptions{}); err != nil {
		t.Errorf("a kubelet cannot register its node: %v", err)
	}
	if _, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("registering another node gives %v, want forbidden", err)
	}
}

func testBoundToken(t *testing.T, c *Cluster) {
	nodes := c.AdminClient().CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bound"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	config, err := c.ServiceAccountConfig(t.Context(), "default", "default",
		&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: "bound"})
	if err != nil {
		t.Fatal(err)
	}
	reviews := clientFor(t, config).AuthenticationV1().SelfSubjectReviews()
	review, err := reviews.Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := review.Status.UserInfo.Extra["authentication.kubernetes.io/node-name"]; !slices.Equal(got, []string{"bound"}) {
		t.Errorf("the token's node is %v, want bound", got)
	}
}

// Without one of these the components' servers log errors for as long as they run.
func testAuthentication(t *testing.T, c *Cluster) {
	published, err := c.AdminClient().CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"client-ca-file", "requestheader-client-ca-file"} {
		if !strings.Contains(published.Data[key], "BEGIN CERTIFICATE") {
			t.Errorf("%s is %q, want a certificate", key, published.Data[key])
		}
	}
}

func testClaimFromTemplate(t *testing.T, c *Cluster) {
	const namespace = "templates"
	if err := c.CreateNamespace(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	client := c.AdminClient()
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}},
		}}},
	}
	if _, err := client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), template, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod := pausePod("with-claim")
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("gpu")}}
	if _, err := client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the pod's claim", func() bool {
		claims, err := client.ResourceV1().ResourceClaims(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return len(claims.Items) == 1 && metav1.IsControlledBy(&claims.Items[0], podByName(t, client, namespace, "with-claim"))
	})
}

func podByName(t *testing.T, client kubernetes.Interface, namespace, name string) *corev1.Pod {
	t.Helper()
	pod, err := client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func pausePod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}},
	}
}

func testApply(t *testing.T, c *Cluster) {
	const manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s, namespace: default}\n"
	dir := t.TempDir()
	plain, kustomized := filepath.Join(dir, "plain"), filepath.Join(dir, "kustomized")
	writeTestFile(t, filepath.Join(plain, "below", "a.yaml"), fmt.Sprintf(manifest, "a"))
	writeTestFile(t, filepath.Join(kustomized, "b.yaml"), fmt.Sprintf(manifest, "b"))
	writeTestFile(t, filepath.Join(kustomized, "kustomization.yaml"), "resources: [b.yaml]\nnamePrefix: x-\n")

	if err := c.Apply(t.Context(), plain, kustomized); err != nil {
		t.Fatal(err)
	}
	maps := c.AdminClient().CoreV1().ConfigMaps("default")
	for _, name := range []string{"a", "x-b"} {
		if _, err := maps.Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			t.Errorf("after Apply: %v", err)
		}
	}
	if err := c.Delete(t.Context(), plain, kustomized); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "x-b"} {
		if _, err := maps.Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("after Delete config map %s gives %v, want not found", name, err)
		}
	}
}

func testStockScheduler(t *testing.T, c *Cluster) {
	scheduler, err := c.StartStockScheduler(t.Context(), SchedulerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	client := c.AdminClient()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "roomy"}}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// A patch, as controllers write the new node too.
	status := fmt.Appendf(nil, `{"status": {"allocatable": {"pods": "10"}, "conditions": [
		{"type": "Ready", "status": "True", "lastHeartbeatTime": %[1]q, "lastTransitionTime": %[1]q}]}}`,
		time.Now().UTC().Format(time.RFC3339))
	if _, err := client.CoreV1().Nodes().Patch(t.Context(), "roomy", types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Pods("default").Create(t.Context(), pausePod("plain"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the pod to be bound", func() bool {
		return podByName(t, client, "default", "plain").Spec.NodeName == "roomy"
	})
	metrics, err := scheduler.Get(t.Context(), "/metrics")
	if err != nil || !strings.Contains(string(metrics), "scheduler_schedule_attempts_total") {
		t.Errorf("the scheduler's metrics cannot be read (error %v)", err)
	}
}

func TestACancelledStartLeavesNothing(t *testing.T) {
	skipIfShort(t)
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer cancel()
		_ = wait.PollUntilContextCancel(ctx, 5*time.Millisecond, true, func(context.Context) (bool, error) {
			return pathExists(filepath.Join(dir, "kube-apiserver.pid")), nil
		})
	}()
	if _, err := Start(ctx, Options{Dir: dir}); !errors.Is(err, context.Canceled) {
		t.Errorf("Start gives %v, want %v", err, context.Canceled)
	}
	if got := processesOf(t, dir); len(got) > 0 {
		t.Errorf("still running are %v", got)
	}
}

func TestAFailedStartLeavesNothingAndShowsTheLog(t *testing.T) {
	skipIfShort(t)
	dir := t.TempDir()
	_, err := Start(t.Context(), Options{Dir: dir, FeatureGates: map[string]bool{"NoSuchGate": true}})
	if err == nil || !strings.Contains(err.Error(), "NoSuchGate") || !strings.Contains(err.Error(), dir) {
		t.Errorf("Start gives %v, want the API server's message and where its log is", err)
	}
	if got := processesOf(t, dir); len(got) > 0 {
		t.Errorf("still running are %v", got)
	}
}

// parentOfACluster starts a cluster, tells its folder and waits to be killed.
func parentOfACluster() {
	c, err := Start(context.Background(), Options{})
	if err != nil {
		panic(err)
	}
	fmt.Println(c.Dir())
	select {}
}

func TestACrashLeavesNoProcessAndTheNextStartNoFolder(t *testing.T) {
	skipIfShort(t)
	temp := t.TempDir()
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), childMode+"=cluster", "TMPDIR="+temp)
	parent.Stderr = os.Stderr
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	dir, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	dir = strings.TrimSpace(dir)
	if got := processesOf(t, dir); len(got) != 3 {
		t.Errorf("running are %v, want three", got)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // "signal: killed"
	waitFor(t, "the processes to end", func() bool { return len(processesOf(t, dir)) == 0 })
	if err := removeLeftovers(temp); err != nil {
		t.Fatal(err)
	}
	if pathExists(dir) {
		t.Errorf("%s is left", dir)
	}
}

func writeTestFile(t *testing.T, path, data string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}
