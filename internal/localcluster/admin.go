// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// kubeletClientUser is who the API server is to kubelets: it may reach logs,
// exec and metrics there and nothing else.
const kubeletClientUser = "kube-apiserver-kubelet-client"

// makeAdmin makes the administrator's configuration, client and kubeconfig.
func (c *Cluster) makeAdmin() error {
	user, err := c.plane.envtest.AddUser(
		envtest.User{Name: "admin", Groups: []string{"system:masters"}},
		&rest.Config{QPS: 1000, Burst: 2000, UserAgent: "stowage-localcluster"})
	if err != nil {
		return fmt.Errorf("making the administrator: %w", err)
	}
	c.admin = user.Config()
	if c.adminClient, err = kubernetes.NewForConfig(c.admin); err != nil {
		return fmt.Errorf("making the administrator's client: %w", err)
	}
	if c.plane.caFile, err = c.writeFile(c.admin.CAData, "ca.crt"); err != nil {
		return err
	}
	c.adminConf, err = c.writeKubeconfig("admin", c.admin)
	return err
}

// allowKubeletClient lets the API server use the kubelets' own API.
func (c *Cluster) allowKubeletClient(ctx context.Context) error {
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "stowage:" + kubeletClientUser},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:kubelet-api-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: kubeletClientUser}},
	}
	_, err := c.adminClient.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("letting the API server reach kubelets: %w", err)
	}
	return nil
}

// waitForServiceAccount waits until a namespace has its default service
// account, without which no pod can be created in it.
func (c *Cluster) waitForServiceAccount(ctx context.Context, namespace string) error {
	err := wait.PollUntilContextTimeout(ctx, readyInterval, DefaultReadyTimeout, true,
		func(ctx context.Context) (bool, error) {
			_, err := c.adminClient.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return false, nil
			}
			return err == nil, err
		})
	if err != nil {
		return fmt.Errorf("waiting for service account default in namespace %s: %w", namespace, err)
	}
	return nil
}
