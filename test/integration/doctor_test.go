// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/util/retry"

	"github.com/google/go-cmp/cmp"
	coordinationapi "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
)

// With the shipped manifests on a real API server, read by an account that has no more than the manifests' rights, nothing is found; and what
// is broken then is. The test is kubelet, scheduler and agent: it binds their pods, says that they are ready, holds the lease and publishes.
func TestDoctorOnARealAPIServer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, err := localcluster.Start(ctx, recorded.of(localcluster.Options{Progress: os.Stderr, ControllerManagerArgs: []string{"--node-monitor-grace-period=2h"}}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	client := c.AdminClient()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.Apply(ctx, filepath.Join(manifests, "overlays/second-scheduler")))
	for name, labels := range map[string]map[string]string{
		"control": {"node-role.kubernetes.io/control-plane": ""}, "gpus": {"stowage.dev.node-restriction.kubernetes.io/gpus": "true"},
	} {
		labels[v1.LabelHostname] = name
		_, err := client.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
		must(err)
		must(retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the controller manager writes to new nodes, too
			node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			node.Status.NodeInfo.KubeletVersion = c.Binaries().KubernetesVersion
			node.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}, {Type: "GPUsReady", Status: v1.ConditionTrue}}
			_, err = client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
			return err
		}))
	}
	_, err = client.ResourceV1().ResourceSlices().Create(ctx, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "gpus"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: gpuDriver, NodeName: ptr.To("gpus"), Pool: resourceapi.ResourcePool{Name: "gpus", ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: ptr.To("gpu")}}}},
		},
	}, metav1.CreateOptions{})
	must(err)
	_, err = client.CoordinationV1().Leases("stowage-system").Create(ctx, &coordinationapi.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "stowage-scheduler"},
		Spec:       coordinationapi.LeaseSpec{HolderIdentity: ptr.To("test"), RenewTime: ptr.To(metav1.NewMicroTime(time.Now().Add(time.Hour)))},
	}, metav1.CreateOptions{})
	must(err)
	// Pods come as controllers make them, until both workloads say that they are ready.
	err = wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, 3*patience, true, func(ctx2 context.Context) (bool, error) {
		pods, err := client.CoreV1().Pods("").List(ctx2, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		for i := range pods.Items {
			pod := &pods.Items[i]
			if pod.Spec.NodeName == "" {
				node := map[string]string{"stowage-system": "control", "stowage-node-agent": "gpus"}[pod.Namespace]
				err = errors.Join(err, client.CoreV1().Pods(pod.Namespace).Bind(ctx2, &v1.Binding{
					ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, Target: v1.ObjectReference{Kind: "Node", Name: node},
				}, metav1.CreateOptions{}))
			} else if pod.Status.Phase == v1.PodPending {
				pod.Status.Phase = v1.PodRunning
				pod.Status.Conditions = append(pod.Status.Conditions, v1.PodCondition{Type: v1.PodReady, Status: v1.ConditionTrue})
				_, failed := client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx2, pod, metav1.UpdateOptions{})
				err = errors.Join(err, failed)
			}
		}
		deployment, failed := client.AppsV1().Deployments("stowage-system").Get(ctx2, "stowage-scheduler", metav1.GetOptions{})
		agent, alsoFailed := client.AppsV1().DaemonSets("stowage-node-agent").Get(ctx2, "stowage-node-agent", metav1.GetOptions{})
		if err := errors.Join(err, failed, alsoFailed); err != nil {
			return false, err
		}
		return deployment.Status.ReadyReplicas == 2 && agent.Status.NumberReady == 1, nil
	})
	must(err)

	binary, err := pluginBinary()
	must(err)
	must(c.Apply(ctx, filepath.Join(manifests, "kubectl/reader.yaml"), filepath.Join(manifests, "kubectl/doctor.yaml")))
	_, err = client.CoreV1().ServiceAccounts("default").Create(ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "doctor"}}, metav1.CreateOptions{})
	must(err)
	subjects := []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "doctor"}}
	for _, role := range []string{"stowage-reader", "stowage-doctor"} {
		_, err = client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: role}, Subjects: subjects,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		}, metav1.CreateOptions{})
		must(err)
	}
	_, err = client.RbacV1().RoleBindings("stowage-system").Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "stowage-doctor"}, Subjects: subjects,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "stowage-doctor"},
	}, metav1.CreateOptions{})
	must(err)
	config, err := c.ServiceAccountKubeconfig(ctx, "default", "doctor", nil)
	must(err)
	examine := func(args ...string) (found []string, skipped []string, code int) {
		t.Helper()
		command := exec.CommandContext(ctx, binary, append([]string{"doctor", "-o", "json"}, args...)...)
		command.Env = append(os.Environ(), "HOME="+t.TempDir())
		var out, errOut bytes.Buffer
		command.Stdout, command.Stderr = &out, &errOut
		_ = command.Run()
		var report struct {
			Findings []struct{ Severity, Check, Object, Problem string }
			Skipped  []struct{ Check, Why string }
		}
		if err := json.Unmarshal(out.Bytes(), &report); err != nil {
			t.Fatalf("%v: %s%s", err, out.String(), errOut.String())
		}
		for _, f := range report.Findings {
			found = append(found, f.Severity+" "+f.Check+" "+f.Object+": "+f.Problem)
		}
		for _, s := range report.Skipped {
			skipped = append(skipped, s.Check)
		}
		return found, skipped, command.ProcessState.ExitCode()
	}
	found, skipped, code := examine("--kubeconfig", config)
	if len(found) > 0 || code != 0 || !slices.Equal(skipped, []string{"kubelet-gates"}) { // there are no kubelets
		t.Errorf("code %d: %q, not looked at: %q", code, found, skipped)
	} else {
		recorded.show("stowage-doctor: get /metrics") // it is no resource, and not recorded
	}

	must(client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(ctx, "stowage-claims-in-use", metav1.DeleteOptions{}))
	must(client.RbacV1().ClusterRoleBindings().Delete(ctx, "stowage-node-agent", metav1.DeleteOptions{}))
	must(client.ResourceV1().DeviceClasses().Delete(ctx, "gpu.nvidia.com", metav1.DeleteOptions{}))
	must(client.RbacV1().RoleBindings("stowage-system").Delete(ctx, "stowage-scheduler-leader-election", metav1.DeleteOptions{}))
	wanted := []string{
		"error agent-rights serviceaccount stowage-node-agent/stowage-node-agent", "error classes deviceclass gpu.nvidia.com",
		"error lease-rights serviceaccount stowage-system/stowage-scheduler", "error policies validatingadmissionpolicy stowage-claims-in-use",
	}
	heads := func(found []string) (heads []string) {
		for _, f := range found {
			head, _, _ := strings.Cut(f, ": ")
			heads = append(heads, head)
		}
		slices.Sort(heads)
		return heads
	}
	found, _, code = examine("--kubeconfig", config)
	if diff := cmp.Diff(wanted, heads(found)); diff != "" || code != 3 {
		t.Errorf("code %d, %s", code, diff)
	}
	// A file says the same to somebody else.
	file := filepath.Join(t.TempDir(), "cluster.json")
	taken, err := exec.CommandContext(ctx, binary, "snapshot", "--kubeconfig", config).Output()
	must(err)
	must(os.WriteFile(file, taken, 0o600))
	again, _, _ := examine("--snapshot", file)
	if diff := cmp.Diff(wanted, heads(again)); diff != "" {
		t.Errorf("from a file: %s", diff)
	}
}
