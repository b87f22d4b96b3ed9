// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/policies"
)

var dryRun = []string{metav1.DryRunAll}

// worst is what somebody with a stolen token would do first.
type worst struct {
	// may names the tokens that are for that.
	may string
	// do is a dry run, where it writes.
	do func(ctx context.Context, client kubernetes.Interface) error
	// as is whom it impersonates.
	as rest.ImpersonationConfig
}

// With the token of the node agent, of the scheduler, of who reads metrics or of who uses kubectl stowage the twenty worst things are refused; an administrator's is not,
// so that what is refused is the right and not the request.
func TestAStolenTokenDoesNotDoTheWorst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.driver = gpuDriver
	w.addNode("a", gpus(h100, 2)...)
	w.addNode("b", gpus(h100, 2)...)
	pod := w.newPod("victim")
	pod.Spec.NodeName = w.nodeName("b")
	_, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, pod, metav1.CreateOptions{})
	w.must(err, "making the victim")
	w.addClaim("free", spec(w.exactly("gpu", 1)))
	w.allocate(w.addClaim("held", spec(w.exactly("gpu", 1))), "b", "gpu-0")
	_, err = w.client.CoreV1().Secrets(w.name).Create(w.ctx, &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "secret"}}, metav1.CreateOptions{})
	w.must(err, "making a secret")
	account := w.newAccount("monitor", nil)

	patch := func(body string) (types.PatchType, []byte, metav1.PatchOptions) {
		return types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{DryRun: dryRun}
	}
	b := w.nodeName("b")
	things := map[string]worst{
		"read a secret": {do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(w.name).Get(ctx, "secret", metav1.GetOptions{})
			return err
		}},
		"read all secrets": {do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
			return err
		}},
		"read all pods": {may: "scheduler reader doctor", do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
			return err
		}},
		"read logs": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.CoreV1().Pods(w.name).GetLogs("victim", &v1.PodLogOptions{}).Do(ctx).Error()
		}},
		"make a pod": {do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Pods("kube-system").Create(ctx, w.newPod("evil"), metav1.CreateOptions{DryRun: dryRun})
			return err
		}},
		"change a pod": {do: func(ctx context.Context, c kubernetes.Interface) error {
			kind, body, options := patch(`{"metadata":{"labels":{"x":"y"}}}`)
			_, err := c.CoreV1().Pods(w.name).Patch(ctx, "victim", kind, body, options)
			return err
		}},
		"run a command in a pod": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.CoreV1().RESTClient().Post().Namespace(w.name).Resource("pods").Name("victim").SubResource("exec").
				VersionedParams(&v1.PodExecOptions{Command: []string{"sh"}, Stdout: true}, scheme.ParameterCodec).Do(ctx).Error()
		}},
		"evict a pod": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.PolicyV1().Evictions(w.name).Evict(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "victim", Namespace: w.name}, DeleteOptions: &metav1.DeleteOptions{DryRun: dryRun}})
		}},
		"ask for another account's token": {do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().ServiceAccounts(w.name).CreateToken(ctx, "monitor", &authenticationv1.TokenRequest{}, metav1.CreateOptions{DryRun: dryRun})
			return err
		}},
		"be an administrator": {as: rest.ImpersonationConfig{UserName: "admin", Groups: []string{"system:masters"}}, do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
			return err
		}},
		"be another node": {as: rest.ImpersonationConfig{UserName: "system:node:" + b}, do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + b})
			return err
		}},
		"bind itself to cluster-admin": {do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: w.name + "-evil"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			}, metav1.CreateOptions{DryRun: dryRun})
			return err
		}},
		"widen its role": {do: func(ctx context.Context, c kubernetes.Interface) error {
			kind, body, options := patch(`{"metadata":{"labels":{"x":"y"}}}`)
			_, err := c.RbacV1().ClusterRoles().Patch(ctx, account.role.Name, kind, body, options)
			return err
		}},
		"remove the policies": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(ctx, "stowage-node-agent-own-slices", metav1.DeleteOptions{DryRun: dryRun})
		}},
		"change a class": {do: func(ctx context.Context, c kubernetes.Interface) error {
			kind, body, options := patch(`{"metadata":{"labels":{"x":"y"}}}`)
			_, err := c.ResourceV1().DeviceClasses().Patch(ctx, "gpu.nvidia.com", kind, body, options)
			return err
		}},
		"taint all devices": {do: func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.ResourceV1().DeviceTaintRules().Create(ctx, &resourceapi.DeviceTaintRule{
				ObjectMeta: metav1.ObjectMeta{Name: w.name + "-evil"},
				Spec: resourceapi.DeviceTaintRuleSpec{
					DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(gpuDriver)},
					Taint:          resourceapi.DeviceTaint{Key: "example.com/evil", Effect: resourceapi.DeviceTaintEffectNoExecute},
				},
			}, metav1.CreateOptions{DryRun: dryRun})
			return err
		}},
		"take kube-scheduler's lease": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.CoordinationV1().Leases("kube-system").DeleteCollection(ctx, metav1.DeleteOptions{DryRun: dryRun}, metav1.ListOptions{FieldSelector: "metadata.name=kube-scheduler"})
		}},
		"label a node": {do: func(ctx context.Context, c kubernetes.Interface) error {
			kind, body, options := patch(`{"metadata":{"labels":{"x":"y"}}}`)
			_, err := c.CoreV1().Nodes().Patch(ctx, b, kind, body, options)
			return err
		}},
		"say that another node is down": {do: func(ctx context.Context, c kubernetes.Interface) error {
			kind, body, options := patch(`{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`)
			_, err := c.CoreV1().Nodes().Patch(ctx, b, kind, body, options, "status")
			return err
		}},
		"delete a node": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.CoreV1().Nodes().Delete(ctx, b, metav1.DeleteOptions{DryRun: dryRun})
		}},
		"speak to a kubelet": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.CoreV1().RESTClient().Get().Resource("nodes").Name(b).SubResource("proxy").Suffix("pods").Do(ctx).Error()
		}},
		"write another node's slices": {do: func(ctx context.Context, c kubernetes.Interface) error {
			slice := w.slice("b", gpus(h100, 1)...)
			slice.Name += "-evil"
			_, err := c.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{DryRun: dryRun})
			return err
		}},
		"delete a user's claim": {do: func(ctx context.Context, c kubernetes.Interface) error {
			return c.ResourceV1().ResourceClaims(w.name).Delete(ctx, "free", metav1.DeleteOptions{DryRun: dryRun})
		}},
		"free a claim in use": {may: "scheduler", do: func(ctx context.Context, c kubernetes.Interface) error {
			claim := w.claim("held")
			claim.Finalizers = nil
			_, err := c.ResourceV1().ResourceClaims(w.name).Update(ctx, claim, metav1.UpdateOptions{DryRun: dryRun})
			return err
		}},
		"give a claim devices": {may: "scheduler", do: func(ctx context.Context, c kubernetes.Interface) error {
			claim := w.claim("free")
			claim.Status.Allocation = &resourceapi.AllocationResult{}
			claim.Finalizers = []string{resourceapi.Finalizer}
			_, err := c.ResourceV1().ResourceClaims(w.name).UpdateStatus(ctx, claim, metav1.UpdateOptions{DryRun: dryRun})
			return err
		}},
	}
	monitor, err := cluster.ServiceAccountConfig(w.ctx, w.name, "monitor", nil)
	w.must(err, "getting the identity of who reads metrics")
	_, err = cluster.AdminClient().RbacV1().ClusterRoleBindings().Create(w.ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: w.name + "-reads-metrics"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "stowage-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: w.name, Name: "monitor"}},
	}, metav1.CreateOptions{})
	w.must(err, "binding the role stowage-metrics-reader")
	w.cleanUp(cluster.AdminClient().RbacV1().ClusterRoleBindings().Delete, w.name+"-reads-metrics")
	scheduler, err := schedulerIdentity()
	w.must(err, "getting the scheduler's identity")
	// The doctor has the reader's rights, too. Those in a namespace of ours are given everywhere here, which is more than as shipped.
	var rules []rbacv1.PolicyRule
	tokens := map[string]*rest.Config{"agent": w.agentConfig("a"), "scheduler": scheduler, "monitor": monitor}
	for _, name := range []string{"reader", "doctor"} {
		roles, err := readRoles(filepath.Join(manifests, "kubectl", name+".yaml"))
		w.must(err, "reading the rights of the %s", name)
		for _, role := range roles {
			rules = append(rules, role.Rules...)
		}
		w.newAccount(name, rules)
		tokens[name], err = cluster.ServiceAccountConfig(w.ctx, w.name, name, nil)
		w.must(err, "getting the identity of the %s", name)
	}
	try := func(config *rest.Config, thing worst) error {
		config = rest.CopyConfig(config)
		config.Impersonate = thing.as
		return thing.do(w.ctx, kubernetes.NewForConfigOrDie(config))
	}
	for token, config := range tokens {
		t.Run(token, func(t *testing.T) {
			refused := 0
			for name, thing := range things {
				if strings.Contains(thing.may, token) {
					if err := try(config, thing); apierrors.IsForbidden(err) {
						t.Errorf("%s: %v", name, err)
					}
					continue
				}
				// A policy that was just made may not be in force yet, each at a time of its own, and a server with much to do may give another
				// answer first. The last answer is judged.
				var last error
				if err := wait.PollUntilContextTimeout(w.ctx, 100*time.Millisecond, patience, true, func(context.Context) (bool, error) {
					last = try(config, thing)
					return apierrors.IsForbidden(last) || apierrors.IsInvalid(last) && strings.Contains(last.Error(), "resourceclaims/binding"), nil
				}); err != nil {
					t.Errorf("%s: got %v, want a refusal", name, last)
					continue
				}
				refused++
			}
			if refused < 20 {
				t.Errorf("%d things are refused, want at least 20", refused)
			}
		})
	}
	for name, thing := range things {
		thing.as = rest.ImpersonationConfig{}
		if err := try(cluster.AdminConfig(), thing); apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) {
			t.Errorf("an administrator cannot %s: %v", name, err)
		}
	}
}

// A policy whose account has another name is void, and the agent sees it: with the rights of the role and a token of the node.
func TestAnAgentSeesThatItsPoliciesAreNotAboutItsAccount(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	var rules []rbacv1.PolicyRule
	found, err := readRoles(filepath.Join(manifests, "base/access/node-agent.yaml"))
	w.must(err, "reading the roles of the agent")
	for _, role := range found {
		rules = append(rules, role.Rules...)
	}
	await := func(client kubernetes.Interface, want int, forbidden bool) {
		t.Helper()
		w.awaitPolicy(func(ctx context.Context) error {
			void, unknown := policies.Void(ctx, client, policies.OfNodeAgent(w.nodeName("a")))
			if len(void) == want && apierrors.IsForbidden(unknown) == forbidden && (unknown == nil || forbidden) {
				return errors.New("as it should be")
			}
			t.Logf("void: %q, unknown: %v; want %d, forbidden by others: %t", void, unknown, want, forbidden)
			return nil
		})
	}
	await(w.agent("a"), 0, false)
	for name, tc := range map[string]struct {
		rules     []rbacv1.PolicyRule
		void      int
		forbidden bool
	}{
		"renamed":   {rules: rules, void: 3},
		"powerless": {forbidden: true}, // RBAC refuses, and of the policies nothing is known
	} {
		w.newAccount(name, tc.rules)
		config, err := cluster.ServiceAccountConfig(w.ctx, w.name, name, &authenticationv1.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: w.nodeName("a")})
		w.must(err, "getting the identity")
		await(kubernetes.NewForConfigOrDie(config), tc.void, tc.forbidden)
	}
}

// readRoles are the Roles and ClusterRoles of a manifest.
func readRoles(file string) (found []rbacv1.ClusterRole, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		var role rbacv1.ClusterRole
		if err := decoder.Decode(&role); errors.Is(err, io.EOF) {
			return found, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if role.Kind == "ClusterRole" || role.Kind == "Role" {
			found = append(found, role)
		}
	}
}
